#include "files.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/fields.h"
#include "core/size.h"
#include "core/status.h"

/* ------------------------------------------------------------------------------------------------------------- names */

static const struct {
    option_id option;
    bool output;
} roles[TENSOR_COUNT] = {
    [T_Q] = {OPT_Q, false},    [T_K] = {OPT_K, false},    [T_V] = {OPT_V, false},
    [T_OUT] = {OPT_OUT, true}, [T_LSE] = {OPT_LSE, true}, [T_DOUT] = {OPT_DOUT, false},
    [T_DQ] = {OPT_DQ, true},   [T_DK] = {OPT_DK, true},   [T_DV] = {OPT_DV, true},
};

static bool ends_with(const char *text, const char *end) {
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

static ra_status check_names(const file_set *files) {
    for (int id = 0; id < TENSOR_COUNT; id++) {
        const file_tensor *f = &files->tensors[id];
        if (!f->used || !f->output) continue;
        if (!f->file.name[0] && !ends_with(f->file.path, ".npy"))
            return ra_fail(RA_INVALID, "--%s %s is neither x.npy nor x.safetensors:name", options[f->option].name, f->argument);
        if (strcmp(f->file.name, "__metadata__") == 0)
            return ra_fail(RA_INVALID, "--%s: __metadata__ cannot be a tensor's name", options[f->option].name);
    }
    return RA_OK;
}

/* One file under two options, of which the first at least is written. Only tensors of one .safetensors may share it. */
static ra_status check_pair(const file_tensor *x, const file_tensor *y) {
    if (!ra_path_same(&x->id, &y->id)) return RA_OK;
    const char *one = options[x->option].name, *other = options[y->option].name;
    if (!y->output && x->file.name[0])
        return ra_fail(RA_IO, "--%s %s would replace the file that --%s reads: write to another", one, x->argument, other);
    if (!y->output)
        return ra_fail(RA_INVALID, "--%s %s is the file that --%s reads: write to another", one, x->argument, other);
    if (x->file.name[0] && y->file.name[0] && strcmp(x->file.name, y->file.name) != 0) return RA_OK;
    return ra_fail(RA_INVALID, "--%s and --%s both write %s", one, other, x->argument);
}

/* No output is another file of this call, by whatever name. */
static ra_status check_collisions(const settings *s, file_set *files) {
    file_tensor trace = {.used = s->trace, .output = true, .option = OPT_TRACE, .argument = s->trace};
    const file_tensor *all[TENSOR_COUNT + 1] = {[TENSOR_COUNT] = &trace};
    if (s->trace) RA_TRY(ra_path_identify(s->trace, &trace.id));
    for (int id = 0; id < TENSOR_COUNT; id++) {
        file_tensor *f = &files->tensors[id];
        if (f->used) RA_TRY(ra_path_identify(f->file.path, &f->id));
        all[id] = f;
    }
    for (int x = 0; x <= TENSOR_COUNT; x++)
        for (int y = 0; y <= TENSOR_COUNT; y++) {
            bool looked_at = all[y]->output && y < x; /* as a pair of outputs, the other way round */
            if (x != y && all[x]->used && all[x]->output && all[y]->used && !looked_at) RA_TRY(check_pair(all[x], all[y]));
        }
    return RA_OK;
}

/* The last error says why the file cannot be read; it may hold what its owner needs. */
static ra_status refuse_unread(const file_tensor *f) {
    char reason[512];
    snprintf(reason, sizeof reason, "%s", ra_last_error());
    return ra_fail(RA_IO, "--%s %s exists and cannot be read as .safetensors (%s), so it is not replaced: write to another",
                   options[f->option].name, f->file.path, reason);
}

/* A .safetensors file is replaced as a whole: it may hold nothing that this call does not write, as far as we can tell. */
static ra_status check_replaced(const file_set *files, const file_tensor *f) {
    const char *names[TENSOR_COUNT];
    int count = 0;
    ra_map map;
    for (int id = 0; id < TENSOR_COUNT; id++) {
        const file_tensor *m = &files->tensors[id];
        if (m->used && m->output && ra_path_same(&m->id, &f->id)) names[count++] = m->file.name;
    }
    RA_TRY(ra_map_open(f->file.path, &map));
    char other[64] = "";
    ra_status status = ra_safetensors_other(map.data, map.bytes, count, names, other, sizeof other);
    const bool empty = map.bytes == 0;
    ra_map_close(&map);
    if (status == RA_NOMEM) return ra_fail_context(status, "%s: ", f->file.path);
    if (status != RA_OK && !empty) return refuse_unread(f);
    if (empty || !other[0]) return RA_OK;
    return ra_fail(RA_IO, "--%s %s would replace the whole file, and with it its tensor '%s': write to another file",
                   options[f->option].name, f->argument, other);
}

static ra_status parse_names(const settings *s, file_set *files) {
    for (int id = 0; id < TENSOR_COUNT; id++) {
        file_tensor *f = &files->tensors[id];
        f->option = roles[id].option;
        f->output = roles[id].output;
        f->used = s->given[f->option];
        if (!f->used) continue;
        f->argument = *(const char *const *)((const char *)s + options[f->option].field);
        ra_status status = ra_file_name_parse(f->argument, &f->file);
        if (status != RA_OK) return ra_fail_context(status, "--%s: ", options[f->option].name);
    }
    RA_TRY(check_names(files));
    RA_TRY(check_collisions(s, files));
    for (int id = 0; id < TENSOR_COUNT; id++) {
        const file_tensor *f = &files->tensors[id];
        bool replaces = f->used && f->output && f->file.name[0] && !f->id.name[0];
        if (replaces) RA_TRY(check_replaced(files, f));
    }
    return RA_OK;
}

/* ------------------------------------------------------------------------------------------------------------ shapes */

static const char *show_shape(const ra_array *a) {
    static _Thread_local char texts[2][200];
    static _Thread_local unsigned turn;
    char *text = texts[turn++ % 2];
    int used = snprintf(text, 200, "[");
    for (int i = 0; i < a->ndim; i++)
        used += snprintf(text + used, 200 - (size_t)used, i ? ", %lld" : "%lld", (long long)a->dims[i]);
    snprintf(text + used, 200 - (size_t)used, "]");
    return text;
}

/* Dimension `which` of [B, N, H, D], B being 1 if it is not there. */
static int64_t dim(const ra_array *a, int which) { return a->ndim == 4 ? a->dims[which] : which == 0 ? 1 : a->dims[which - 1]; }

static ra_status misfit(const file_tensor *x, const file_tensor *y, const char *what) {
    return ra_fail(RA_IO, "%s has shape %s and %s has shape %s: %s", x->argument, show_shape(&x->array), y->argument,
                   show_shape(&y->array), what);
}

static ra_status check_shapes(const file_set *files) {
    const file_tensor *q = &files->tensors[T_Q], *k = &files->tensors[T_K], *v = &files->tensors[T_V];
    for (int id = 0; id < TENSOR_COUNT; id++) {
        const file_tensor *f = &files->tensors[id];
        if (!f->used || f->output) continue;
        if (f->array.ndim != 3 && f->array.ndim != 4)
            return ra_fail(RA_IO, "%s has shape %s: [B, N, H, D] or [N, H, D] is needed", f->argument, show_shape(&f->array));
        if (f->array.ndim != q->array.ndim) return misfit(q, f, "all must have the batch dimension, or none");
    }
    if (dim(&k->array, 0) != dim(&q->array, 0)) return misfit(q, k, "the batch sizes differ");
    if (dim(&k->array, 3) != dim(&q->array, 3)) return misfit(q, k, "the last dimensions differ");
    for (int i = 0; i < 4; i++)
        if (dim(&v->array, i) != dim(&k->array, i)) return misfit(k, v, "k and v must have one shape");
    const file_tensor *dout = &files->tensors[T_DOUT];
    for (int i = 0; i < 4 && dout->used; i++)
        if (dim(&dout->array, i) != dim(&q->array, i)) return misfit(q, dout, "dout must have the shape of q");
    if (dim(&q->array, 2) < 1 || dim(&k->array, 2) < 1 || dim(&q->array, 2) % dim(&k->array, 2) != 0)
        return misfit(q, k, "the heads of q must be a multiple of those of k");
    return RA_OK;
}

static ra_status set_dtype(const settings *s, const file_set *files, ra_attention_desc *desc) {
    const file_tensor *q = &files->tensors[T_Q];
    desc->dtype = s->given[OPT_DTYPE] ? (ra_dtype)s->dtype : q->array.dtype;
    if (s->given[OPT_DTYPE]) return RA_OK;
    for (int id = 0; id < TENSOR_COUNT; id++) {
        const file_tensor *f = &files->tensors[id];
        if (f->used && !f->output && f->array.dtype != q->array.dtype)
            return ra_fail(RA_IO, "%s is %s and %s is %s: say with --dtype which type to compute in", q->argument,
                           ra_dtype_name(q->array.dtype), f->argument, ra_dtype_name(f->array.dtype));
    }
    return RA_OK;
}

ra_status files_open(const settings *s, file_set *files, ra_attention_desc *desc) {
    RA_TRY(parse_names(s, files));
    for (int id = 0; id < TENSOR_COUNT; id++) {
        file_tensor *f = &files->tensors[id];
        if (!f->used || f->output) continue;
        RA_TRY(ra_map_array(&f->file, &f->map, &f->array));
        f->data = (unsigned char *)(uintptr_t)f->map.data + f->array.offset;
    }
    RA_TRY(check_shapes(files));
    const ra_array *q = &files->tensors[T_Q].array, *k = &files->tensors[T_K].array;
    files->batched = q->ndim == 4;
    desc->batch = dim(q, 0);
    desc->seq_q = dim(q, 1);
    desc->seq_k = dim(k, 1);
    desc->heads = dim(q, 2);
    desc->kv_heads = dim(k, 2);
    desc->head_dim = dim(q, 3);
    return set_dtype(s, files, desc);
}

/* ----------------------------------------------------------------------------------------------------------- outputs */

static void describe_output(const file_set *files, const ra_attention_desc *desc, tensor_id id, ra_array *a) {
    int64_t n = tensor_rows(desc, id), h = tensor_heads(desc, id);
    memset(a, 0, sizeof *a);
    a->dtype = desc->dtype == RA_F64 ? RA_F64 : RA_F32;
    if (files->batched) a->dims[a->ndim++] = desc->batch;
    a->dims[a->ndim++] = id == T_LSE ? h : n;
    a->dims[a->ndim++] = id == T_LSE ? n : h;
    if (id != T_LSE) a->dims[a->ndim++] = desc->head_dim;
}

static ra_status make_output(const char *path, const char *header, int64_t header_bytes, int64_t bytes, const char *joined,
                             ra_output *o) {
    return joined ? ra_output_join(path, joined, bytes, o) : ra_output_create(path, header, header_bytes, bytes, o);
}

/* Creates (or joins) the file of tensor `first` and of all later ones in the same .safetensors. */
static ra_status make_one(file_set *files, tensor_id first, const char *joined) {
    file_tensor *members[TENSOR_COUNT];
    const char *names[TENSOR_COUNT];
    ra_array arrays[TENSOR_COUNT];
    int count = 0;
    file_tensor *f = &files->tensors[first];
    for (int id = (int)first; id < TENSOR_COUNT; id++) {
        file_tensor *m = &files->tensors[id];
        if (!m->used || !m->output || m->data) continue;
        if (!ra_path_same(&m->id, &f->id)) continue;
        names[count] = m->file.name;
        arrays[count] = m->array;
        members[count++] = m;
    }
    ra_output *output = &files->outputs[files->output_count];
    ra_status status;
    if (f->file.name[0]) {
        char *header;
        int64_t header_bytes;
        RA_TRY(ra_safetensors_header(count, names, arrays, &header, &header_bytes));
        int64_t bytes = arrays[count - 1].offset + arrays[count - 1].bytes;
        status = make_output(f->file.path, header, header_bytes, bytes, joined, output);
        free(header);
    } else {
        char header[RA_NPY_HEADER_MAX];
        RA_TRY(ra_npy_header(&arrays[0], header));
        status = make_output(f->file.path, header, arrays[0].offset, arrays[0].offset + arrays[0].bytes, joined, output);
    }
    RA_TRY(status);
    files->output_count++;
    for (int i = 0; i < count; i++) {
        members[i]->array = arrays[i];
        members[i]->data = output->data + arrays[i].offset;
    }
    return RA_OK;
}

void files_describe(file_set *files, const ra_attention_desc *desc) {
    for (int id = 0; id < TENSOR_COUNT; id++)
        if (files->tensors[id].used && files->tensors[id].output)
            describe_output(files, desc, (tensor_id)id, &files->tensors[id].array);
}

static ra_status make_all(file_set *files, const file_names *names) {
    for (int id = 0; id < TENSOR_COUNT; id++) {
        file_tensor *f = &files->tensors[id];
        if (!f->used || !f->output || f->data) continue;
        RA_TRY(make_one(files, (tensor_id)id, names ? names->name[files->output_count] : NULL));
    }
    return RA_OK;
}

ra_status files_create(file_set *files) { return make_all(files, NULL); }
ra_status files_join(file_set *files, const file_names *names) { return make_all(files, names); }

void files_names(const file_set *files, file_names *names) {
    memset(names, 0, sizeof *names);
    for (int i = 0; i < files->output_count; i++)
        snprintf(names->name[i], sizeof names->name[i], "%s", ra_output_temporary(&files->outputs[i]));
}

static uint64_t hash(const char *text) { return ra_fnv(RA_FNV_START, text, (int64_t)strlen(text)); }

file_request files_request(const file_set *files) {
    file_request r = {0};
    char target[RA_PATH_MAX];
    for (int id = 0; id < TENSOR_COUNT; id++) {
        const file_tensor *f = &files->tensors[id];
        for (int first = id; f->used && f->output && first >= 0; first--) {
            const file_tensor *other = &files->tensors[first];
            if (other->used && other->output && ra_path_same(&other->id, &f->id)) r.first[id] = 1 + first;
        }
        r.name[id] = hash(f->used ? f->file.name : "");
        if (!f->used || !f->output || ra_path_resolve(f->file.path, target) != RA_OK) continue;
        r.file[id] = hash(ra_path_name(target));
    }
    return r;
}

ra_status files_agree(const file_request *all, int ranks) {
    for (int rank = 1; rank < ranks; rank++)
        for (int id = 0; id < TENSOR_COUNT; id++) {
            const int here = all[0].first[id], there = all[rank].first[id];
            const char *name = options[roles[id].option].name;
            if (!here != !there)
                return ra_fail(RA_DISAGREE, "ranks disagree: --%s is given on rank %d and not on rank %d", name,
                               here ? 0 : rank, here ? rank : 0);
            if (here != there || (here && all[0].name[id] != all[rank].name[id]))
                return ra_fail(RA_DISAGREE,
                               "ranks disagree: --%s has another name in its file, or shares it with other outputs, on rank %d "
                               "than on rank 0",
                               name, rank);
            if (all[0].file[id] != all[rank].file[id])
                return ra_fail(RA_DISAGREE, "ranks disagree: --%s is another file on rank %d than on rank 0", name, rank);
        }
    return RA_OK;
}

ra_status files_sync(file_set *files) {
    for (int i = 0; i < files->output_count; i++) RA_TRY(ra_output_sync(&files->outputs[i]));
    return RA_OK;
}

ra_status files_publish(file_set *files) {
    /* A signal waits until all names are given: all outputs or none. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    ra_status status = ra_outputs_publish(files->outputs, files->output_count);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

void files_leave(file_set *files) {
    for (int i = 0; i < files->output_count; i++) ra_output_leave(&files->outputs[i]);
}

void files_close(file_set *files) {
    for (int i = 0; i < files->output_count; i++) ra_output_discard(&files->outputs[i]);
    for (int id = 0; id < TENSOR_COUNT; id++)
        if (!files->tensors[id].output) ra_map_close(&files->tensors[id].map);
}
