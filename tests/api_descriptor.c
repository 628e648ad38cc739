/* Every field of the descriptor with every kind of wrong value: the status, and a sentence that names the field, from each
 * function that takes a descriptor. Statuses and enum values are pinned. */
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

static void good(test_case *c) {
    test_case_init(c);
    c->desc.branches = 2;
    c->segment_lengths[0] = 8;
    c->segment_lengths[1] = 16;
    c->dilation_rates[0] = 1;
    c->dilation_rates[1] = 2;
    c->key_range = true;
    c->key_begin[0] = 1;
    c->key_end[0] = 15;
    test_case_link(c);
}

/* A way to spoil a good case. */
typedef struct spoiler {
    const char *field; /* what the sentence must name */
    void (*spoil)(test_case *c);
    ra_status status;
} spoiler;

#define SPOIL(name, statement)                                                                                                 \
    static void spoil_##name(test_case *c) { statement; }

SPOIL(struct_size_zero, c->desc.struct_size = 0)
SPOIL(struct_size_older, c->desc.struct_size = 8)
SPOIL(struct_size_newer, c->desc.struct_size += 64)
SPOIL(version, c->desc.version = 999)
SPOIL(dtype, c->desc.dtype = (ra_dtype)4)
SPOIL(dtype_negative, c->desc.dtype = (ra_dtype)-1)
SPOIL(batch, c->desc.batch = -1)
SPOIL(seq_q, c->desc.seq_q = -1)
SPOIL(seq_k, c->desc.seq_k = -1)
SPOIL(seq_q_min, c->desc.seq_q = INT64_MIN)
SPOIL(seq_k_max, c->desc.seq_k = INT64_MAX)
SPOIL(heads_zero, c->desc.heads = 0; c->desc.kv_heads = 0)
SPOIL(heads_negative, c->desc.heads = -2)
SPOIL(kv_heads_negative, c->desc.kv_heads = -1)
SPOIL(kv_heads_ratio, c->desc.heads = 5; c->desc.kv_heads = 2)
SPOIL(kv_heads_more, c->desc.heads = 2; c->desc.kv_heads = 4)
SPOIL(head_dim_zero, c->desc.head_dim = 0)
SPOIL(head_dim_large, c->desc.head_dim = 257)
SPOIL(head_dim_negative, c->desc.head_dim = -8)
SPOIL(branches_negative, c->desc.branches = -1)
SPOIL(branches_many, c->desc.branches = 100000)
SPOIL(segments_null, c->desc.segment_lengths = NULL)
SPOIL(rates_null, c->desc.dilation_rates = NULL)
SPOIL(segment_negative, c->segment_lengths[1] = -4)
SPOIL(rate_zero, c->dilation_rates[1] = 0)
SPOIL(rate_negative, c->dilation_rates[0] = -1)
SPOIL(combine, c->desc.combine = (ra_combine)2)
SPOIL(combine_heads, c->desc.heads = c->desc.kv_heads = 1)
SPOIL(offset, c->desc.offset = (ra_offset)4)
SPOIL(window_left, c->desc.window_left = -2)
SPOIL(window_right, c->desc.window_right = -2)
SPOIL(key_begin_negative, c->key_begin[0] = -1)
SPOIL(key_end_beyond, c->key_end[0] = 17)
SPOIL(key_range_backwards, c->key_begin[0] = 9; c->key_end[0] = 8)
SPOIL(scale_infinite, c->desc.scale = (double)INFINITY)
SPOIL(scale_beyond_float, c->desc.scale = -1e39)
SPOIL(dropout_one, c->desc.dropout = 1)
SPOIL(dropout_negative, c->desc.dropout = -0.1)
SPOIL(dropout_nan, c->desc.dropout = (double)NAN)
SPOIL(layout, c->desc.layout = (ra_layout)3)
SPOIL(placement, c->desc.query_placement = (ra_placement)2)
SPOIL(schedule, c->desc.schedule = (ra_schedule)4)
SPOIL(merge_sharded, c->desc.schedule = RA_SCHEDULE_MERGE)
SPOIL(bucket, c->desc.bucket = -1)
SPOIL(memory_limit, c->desc.memory_limit = -1)
SPOIL(device, c->desc.device = (ra_device)2)
SPOIL(threads, c->desc.threads = -1)
SPOIL(threads_absurd, c->desc.threads = INT_MAX)
SPOIL(too_large, c->desc.seq_q = c->desc.seq_k = (int64_t)1 << 39; c->desc.batch = (int64_t)1 << 39; c->desc.key_begin = NULL;
      c->desc.key_end = NULL)
SPOIL(softcap, c->desc.softcap = 30)
SPOIL(cu_seqlens, c->desc.cu_seqlens = c->key_begin)
SPOIL(sinks, static const float sink[4] = {0}; c->desc.sinks = sink)

static const spoiler spoilers[] = {
    {"struct_size", spoil_struct_size_zero, RA_INVALID},
    {"struct_size", spoil_struct_size_older, RA_INVALID},
    {"struct_size", spoil_struct_size_newer, RA_INVALID},
    {"version", spoil_version, RA_INVALID},
    {"dtype", spoil_dtype, RA_INVALID},
    {"dtype", spoil_dtype_negative, RA_INVALID},
    {"batch", spoil_batch, RA_INVALID},
    {"seq_q", spoil_seq_q, RA_INVALID},
    {"seq_k", spoil_seq_k, RA_INVALID},
    {"seq_q", spoil_seq_q_min, RA_INVALID},
    {"seq_k", spoil_seq_k_max, RA_INVALID},
    {"heads", spoil_heads_zero, RA_INVALID},
    {"heads", spoil_heads_negative, RA_INVALID},
    {"kv_heads", spoil_kv_heads_negative, RA_INVALID},
    {"kv_heads", spoil_kv_heads_ratio, RA_INVALID},
    {"kv_heads", spoil_kv_heads_more, RA_INVALID},
    {"head_dim", spoil_head_dim_zero, RA_INVALID},
    {"head_dim", spoil_head_dim_large, RA_INVALID},
    {"head_dim", spoil_head_dim_negative, RA_INVALID},
    {"branches", spoil_branches_negative, RA_INVALID},
    {"branches", spoil_branches_many, RA_INVALID},
    {"segment_lengths", spoil_segments_null, RA_INVALID},
    {"dilation_rates", spoil_rates_null, RA_INVALID},
    {"segment_lengths", spoil_segment_negative, RA_INVALID},
    {"dilation_rates", spoil_rate_zero, RA_INVALID},
    {"dilation_rates", spoil_rate_negative, RA_INVALID},
    {"combine", spoil_combine, RA_INVALID},
    {"mix", spoil_combine_heads, RA_INVALID},
    {"offset", spoil_offset, RA_INVALID},
    {"window_left", spoil_window_left, RA_INVALID},
    {"window_right", spoil_window_right, RA_INVALID},
    {"key", spoil_key_begin_negative, RA_INVALID},
    {"key", spoil_key_end_beyond, RA_INVALID},
    {"key", spoil_key_range_backwards, RA_INVALID},
    {"scale", spoil_scale_infinite, RA_INVALID},
    {"scale", spoil_scale_beyond_float, RA_INVALID},
    {"dropout", spoil_dropout_one, RA_INVALID},
    {"dropout", spoil_dropout_negative, RA_INVALID},
    {"dropout", spoil_dropout_nan, RA_INVALID},
    {"layout", spoil_layout, RA_INVALID},
    {"query_placement", spoil_placement, RA_INVALID},
    {"schedule", spoil_schedule, RA_INVALID},
    {"query_placement", spoil_merge_sharded, RA_INVALID},
    {"bucket", spoil_bucket, RA_INVALID},
    {"memory_limit", spoil_memory_limit, RA_INVALID},
    {"device", spoil_device, RA_INVALID},
    {"threads", spoil_threads, RA_INVALID},
    {"threads", spoil_threads_absurd, RA_INVALID},
    {"seq", spoil_too_large, RA_INVALID},
    {"softcap", spoil_softcap, RA_NOT_AVAILABLE},
    {"cu_seqlens", spoil_cu_seqlens, RA_NOT_AVAILABLE},
    {"sinks", spoil_sinks, RA_NOT_AVAILABLE},
};

static void refused(const spoiler *s, const char *function, ra_status status) {
    if (status != s->status) {
        fail_msg("%s with a bad %s returned %s: %s", function, s->field, ra_status_name(status), ra_last_error());
    }
    if (!strstr(ra_last_error(), s->field)) fail_msg("%s: '%s' does not name %s", function, ra_last_error(), s->field);
    assert_null(strchr(ra_last_error(), '\n')); /* one sentence, one line */
}

static void every_bad_field_is_refused_by_name_everywhere(void **state) {
    (void)state;
    ra_comm *comm;
    assert_int_equal(ra_comm_self(&comm), RA_OK);
    for (size_t n = 0; n < sizeof spoilers / sizeof *spoilers; n++) {
        const spoiler *s = &spoilers[n];
        test_case c;
        good(&c);
        assert_int_equal(ra_attention_desc_check(&c.desc), RA_OK);
        s->spoil(&c);
        refused(s, "ra_attention_desc_check", ra_attention_desc_check(&c.desc));
        ra_rank_summary summary = {.struct_size = sizeof summary};
        refused(s, "ra_plan_summary", ra_plan_summary(&c.desc, 0, 1, &summary));
        ra_plan *plan = NULL;
        refused(s, "ra_plan_create", ra_plan_create(comm, &c.desc, &plan));
        assert_null(plan);
        ra_forward_args args = {0};
        refused(s, "ra_attention", ra_attention(&c.desc, &args));
        ra_shard queries, keys;
        refused(s, "ra_shard_rows", ra_shard_rows(&c.desc, 0, 1, &queries, &keys));
    }
    print_message("%zu bad fields\n", sizeof spoilers / sizeof *spoilers);

    /* A refused descriptor does not break the communicator. */
    test_case c;
    good(&c);
    ra_plan *plan;
    assert_int_equal(ra_plan_create(comm, &c.desc, &plan), RA_OK);
    ra_plan_destroy(plan);
    ra_comm_destroy(comm);
}

static void the_edges_of_what_is_allowed_are_allowed(void **state) {
    (void)state;
    test_case c;
    good(&c);
    c.desc.batch = 0;
    assert_int_equal(ra_attention_desc_check(&c.desc), RA_OK);
    good(&c);
    c.desc.kv_heads = 0; /* as heads */
    assert_int_equal(ra_attention_desc_check(&c.desc), RA_OK);
    c.desc.branches = 0; /* dense */
    assert_int_equal(ra_attention_desc_check(&c.desc), RA_OK);
    c.desc.head_dim = 256;
    assert_int_equal(ra_attention_desc_check(&c.desc), RA_OK);
    c.key_begin[0] = c.key_end[0] = 16; /* no key at all */
    assert_int_equal(ra_attention_desc_check(&c.desc), RA_OK);
    c.desc.key_begin = NULL; /* an end alone */
    assert_int_equal(ra_attention_desc_check(&c.desc), RA_OK);
    c.desc.seq_k = 0;
    c.desc.key_end = NULL;
    assert_int_equal(ra_attention_desc_check(&c.desc), RA_OK);
    c.desc.seq_q = 0;
    assert_int_equal(ra_attention_desc_check(&c.desc), RA_OK);
    c.desc.scale = 0;
    c.desc.dropout = 0.999999;
    c.desc.window_left = c.desc.window_right = 0;
    assert_int_equal(ra_attention_desc_check(&c.desc), RA_OK);
    c.desc.dtype = RA_F64;
    c.desc.scale = 1e39;
    assert_int_equal(ra_attention_desc_check(&c.desc), RA_OK);
}

static void init_fills_the_documented_defaults(void **state) {
    (void)state;
    ra_attention_desc desc;
    memset(&desc, 0xa5, sizeof desc);
    ra_attention_desc_init(&desc);
    assert_int_equal(desc.struct_size, sizeof desc);
    assert_int_equal(desc.dtype, RA_F32);
    assert_int_equal(desc.batch, 1);
    assert_int_equal(desc.branches, 0);
    assert_null(desc.segment_lengths);
    assert_null(desc.dilation_rates);
    assert_int_equal(desc.combine, RA_COMBINE_HEADS);
    assert_int_equal(desc.offset, RA_OFFSET_BRANCH);
    assert_true(desc.dilate_queries);
    assert_false(desc.causal);
    assert_int_equal(desc.window_left, -1);
    assert_int_equal(desc.window_right, -1);
    assert_null(desc.key_begin);
    assert_null(desc.key_end);
    assert_true(isnan(desc.scale));
    assert_true(desc.dropout == 0);
    assert_int_equal(desc.layout, RA_LAYOUT_CONTIGUOUS);
    assert_int_equal(desc.query_placement, RA_SHARDED);
    assert_int_equal(desc.schedule, RA_SCHEDULE_AUTO);
    assert_int_equal(desc.bucket, 0);
    assert_int_equal(desc.memory_limit, 0);
    assert_int_equal(desc.threads, 0);
    assert_false(desc.checksum);
    assert_null(desc.kernel);
}

static void status_values_and_names_are_pinned(void **state) {
    (void)state;
    static const struct {
        int value;
        ra_status status;
        const char *name;
    } table[] = {{0, RA_OK, "RA_OK"},
                 {1, RA_INVALID, "RA_INVALID"},
                 {2, RA_NOMEM, "RA_NOMEM"},
                 {3, RA_IO, "RA_IO"},
                 {4, RA_PEER_LOST, "RA_PEER_LOST"},
                 {5, RA_TIMEOUT, "RA_TIMEOUT"},
                 {6, RA_DISAGREE, "RA_DISAGREE"},
                 {7, RA_PROTOCOL, "RA_PROTOCOL"},
                 {8, RA_NOT_AVAILABLE, "RA_NOT_AVAILABLE"},
                 {9, RA_ABORTED, "RA_ABORTED"},
                 {10, RA_DEVICE, "RA_DEVICE"},
                 {11, RA_INTERNAL, "RA_INTERNAL"}};
    for (size_t n = 0; n < sizeof table / sizeof *table; n++) {
        assert_int_equal(table[n].status, table[n].value);
        assert_string_equal(ra_status_name(table[n].status), table[n].name);
    }
    assert_non_null(ra_status_name((ra_status)12345));
    assert_non_null(ra_status_name((ra_status)-1));
}

static void enum_values_and_sizes_are_pinned(void **state) {
    (void)state;
    assert_true(RA_F32 == 0 && RA_BF16 == 1 && RA_F16 == 2 && RA_F64 == 3);
    assert_true(RA_COMBINE_HEADS == 0 && RA_COMBINE_MIX == 1);
    assert_true(RA_OFFSET_BRANCH == 0 && RA_OFFSET_HEAD == 1 && RA_OFFSET_HEAD_BLOCK == 2 && RA_OFFSET_RESIDUE == 3);
    assert_true(RA_LAYOUT_CONTIGUOUS == 0 && RA_LAYOUT_ZIGZAG == 1 && RA_LAYOUT_STRIPED == 2);
    assert_true(RA_SHARDED == 0 && RA_REPLICATED == 1);
    assert_true(RA_SCHEDULE_AUTO == 0 && RA_SCHEDULE_RING == 1 && RA_SCHEDULE_GATHER == 2 && RA_SCHEDULE_MERGE == 3);
    assert_int_equal(ra_dtype_size(RA_F32), 4);
    assert_int_equal(ra_dtype_size(RA_BF16), 2);
    assert_int_equal(ra_dtype_size(RA_F16), 2);
    assert_int_equal(ra_dtype_size(RA_F64), 8);
    assert_int_equal(ra_dtype_size((ra_dtype)4), 0);
    assert_int_equal(ra_dtype_size((ra_dtype)-1), 0);
    assert_string_equal(ra_version(), RA_VERSION_STRING);
    ra_dtype recommended = ra_recommended_dtype(RA_DEVICE_CPU);
    assert_true(ra_dtype_size(recommended) > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_bad_field_is_refused_by_name_everywhere),
        cmocka_unit_test(the_edges_of_what_is_allowed_are_allowed),
        cmocka_unit_test(init_fills_the_documented_defaults),
        cmocka_unit_test(status_values_and_names_are_pinned),
        cmocka_unit_test(enum_values_and_sizes_are_pinned),
    };
    return cmocka_run_group_tests_name("descriptor", tests, NULL, NULL);
}
