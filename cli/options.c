#include "options.h"

#define ONLY(c) (1u << CMD_##c)
#define FILES (ONLY(RUN) | ONLY(GRAD))
#define SHAPED (ONLY(VERIFY) | ONLY(BENCH) | ONLY(MEMORY) | ONLY(PLAN) | ONLY(WHY) | ONLY(DRAW))
#define SHARED (FILES | SHAPED)
#define COMPUTING (FILES | ONLY(VERIFY) | ONLY(BENCH) | ONLY(MEMORY) | ONLY(DEMO))
#define EXPLAINING (ONLY(PLAN) | ONLY(WHY) | ONLY(DRAW)) /* without computing */
#define PICTURING (ONLY(WHY) | ONLY(DRAW))
#define EVERY (SHARED | ONLY(INFO) | ONLY(DEMO))

#define AT(field) offsetof(settings, field)
#define LARGE ((int64_t)1 << 40)

const command_row commands[COMMAND_COUNT] = {
    [CMD_RUN] = {"run", "--q F --k F --v F --out F [--lse F] [OPTION...]", "attention of files"},
    [CMD_GRAD] = {"grad", "--q F --k F --v F --dout F --dq F --dk F --dv F [--out F] [--lse F] [OPTION...]",
                  "attention of files and its gradient"},
    [CMD_VERIFY] = {"verify", "[--cases N] [OPTION...]",
                    "random cases, or the one that the options describe, against a float64 reference"},
    [CMD_BENCH] = {"bench", "[--pass fwd|bwd|both] [--repeat N] [--rank R] [OPTION...]",
                   "time, useful FLOP/s, bytes and memory"},
    [CMD_MEMORY] = {"memory", "[--seq LIST] [--ring-sizes LIST] [OPTION...]", "measured peak of a rank at several ring sizes"},
    [CMD_PLAN] = {"plan", "[--machine NAME|FILE] [--fit] [OPTION...]", "what each rank would do, without computing"},
    [CMD_WHY] = {"why", "--query X --key Y [--head H] [OPTION...]", "does this query attend to this key, and by which rule"},
    [CMD_DRAW] = {"draw", "[--svg FILE] [OPTION...]", "the pattern of a short sequence, coloured by ring step"},
    [CMD_INFO] = {"info", "", "version, kernels, devices and transports found here"},
    [CMD_DEMO] = {"demo", "", "a tour of under a minute that checks itself"},
    [CMD_COMPLETION] = {"completion", "bash|zsh", "prints a completion script for the shell"},
    [CMD_MAN] = {"man", "", "prints the manual page"},
};

#ifdef __clang__
#pragma clang diagnostic ignored "-Wmissing-field-initializers" /* few options set the last two */
#endif
const option options[OPTION_COUNT] = {
    [OPT_Q] = {"q", KIND_FILE, AT(q), FILES, "F", 0, 0, "", "queries: x.npy or x.safetensors:name, [B, N, H, D] or [N, H, D]"},
    [OPT_K] = {"k", KIND_FILE, AT(k), FILES, "F", 0, 0, "", "keys"},
    [OPT_V] = {"v", KIND_FILE, AT(v), FILES, "F", 0, 0, "", "values"},
    [OPT_DOUT] = {"dout", KIND_FILE, AT(dout), ONLY(GRAD), "F", 0, 0, "", "gradient of the output, like q"},
    [OPT_OUT] = {"out", KIND_FILE, AT(out), FILES, "F", 0, 0, "",
                 "output, float32 (float64 for f64): x.npy or x.safetensors:name"},
    [OPT_LSE] = {"lse", KIND_FILE, AT(lse), FILES, "F", 0, 0, "", "log of the sum of exponentials of each row, [B, H, N]"},
    [OPT_DQ] = {"dq", KIND_FILE, AT(dq), ONLY(GRAD), "F", 0, 0, "", "gradient of q"},
    [OPT_DK] = {"dk", KIND_FILE, AT(dk), ONLY(GRAD), "F", 0, 0, "", "gradient of k"},
    [OPT_DV] = {"dv", KIND_FILE, AT(dv), ONLY(GRAD), "F", 0, 0, "", "gradient of v"},

    [OPT_CASES] = {"cases", KIND_INTEGER, AT(cases), ONLY(VERIFY), "N", 1, 1000000, "40, or 1 when options describe a case",
                   "random cases; options that are given stay fixed"},
    [OPT_PASS] = {"pass", KIND_CHOICE, AT(pass), ONLY(BENCH) | ONLY(MEMORY) | ONLY(PLAN), "fwd|bwd|both", 0, 0, "fwd",
                  "forward, backward alone, or both"},
    [OPT_REPEAT] = {"repeat", KIND_INTEGER, AT(repeat), ONLY(BENCH), "N", 1, 1000000, "5", "timed repetitions"},
    [OPT_RANK] = {"rank", KIND_INTEGER, AT(rank), ONLY(BENCH), "R", 0, 1 << 20, "",
                  "plays this rank of the ring alone, with generated peers, and rechecks sampled rows"},
    [OPT_RING_SIZES] = {"ring-sizes", KIND_LIST, AT(ring_sizes), ONLY(MEMORY), "LIST", 1, 1 << 16, "1,2,4,8",
                        "ring sizes to run"},
    [OPT_MACHINE] = {"machine", KIND_TEXT, AT(machine), ONLY(PLAN), "NAME|FILE", 0, 0, "laptop",
                     "machine for the predicted time: laptop, or a JSON file"},
    [OPT_FIT] = {"fit", KIND_FLAG, AT(fit), ONLY(PLAN), "", 0, 0, "",
                 "finds the longest sequence within --memory-limit on --ring-size ranks"},
    [OPT_QUERY] = {"query", KIND_INTEGER, AT(query), ONLY(WHY), "X", 0, LARGE, "", "index of the query"},
    [OPT_KEY] = {"key", KIND_INTEGER, AT(key), ONLY(WHY), "Y", 0, LARGE, "", "index of the key"},
    [OPT_HEAD] = {"head", KIND_INTEGER, AT(head), ONLY(WHY) | ONLY(DRAW), "H", 0, 1 << 30, "0", "query head"},
    [OPT_SVG] = {"svg", KIND_FILE, AT(svg), ONLY(DRAW), "FILE", 0, 0, "", "draws into this file, x.svg"},

    [OPT_BATCH] = {"batch", KIND_INTEGER, AT(batch), SHAPED, "B", 0, LARGE, "1", "batch entries"},
    [OPT_SEQ] = {"seq", KIND_LIST, AT(seq), SHAPED, "N", 0, LARGE, "4096 (draw: 48)",
                 "keys, and queries unless --seq-q (memory: a list); K, M and G are powers of 1024, 1e6 a million"},
    [OPT_SEQ_Q] = {"seq-q", KIND_INTEGER, AT(seq_q), SHAPED, "N", 0, LARGE, "as --seq",
                   "queries; the last one meets the last key"},
    [OPT_HEADS] = {"heads", KIND_INTEGER, AT(heads), SHAPED, "H", 1, 1 << 30, "8", "query heads"},
    [OPT_KV_HEADS] = {"kv-heads", KIND_INTEGER, AT(kv_heads), SHAPED, "H", 1, 1 << 30, "as --heads",
                      "heads of keys and values"},
    [OPT_HEAD_DIM] = {"head-dim", KIND_INTEGER, AT(head_dim), SHAPED, "D", 1, 256, "64", "elements of a head"},

    [OPT_SEGMENT_LENGTHS] = {"segment-lengths", KIND_LIST, AT(segment_lengths), SHARED, "LIST", 0, LARGE, "0",
                             "segment length of each branch, 0 = the whole sequence"},
    [OPT_DILATION_RATES] = {"dilation-rates", KIND_LIST, AT(dilation_rates), SHARED, "LIST", 1, LARGE, "1",
                            "dilation of each branch"},
    [OPT_LIKE] = {"like", KIND_CHOICE, AT(like), SHARED, "dense|fkodom|longnet|torchscale|strided", 0, 0, "none",
                  "sets combine and offset as that library has them"},
    [OPT_COMBINE] = {"combine", KIND_CHOICE, AT(combine), SHARED, "heads|mix", 0, 0, "heads",
                     "deal heads to branches, or run every branch in every head"},
    [OPT_OFFSET] = {"offset", KIND_CHOICE, AT(offset), SHARED, "branch|head|head-block|residue", 0, 0, "branch",
                    "which place of the lattice a branch starts from"},
    [OPT_DILATE_QUERIES] = {"dilate-queries", KIND_CHOICE, AT(dilate_queries), SHARED, "no|yes", 0, 0, "yes",
                            "queries off the lattice have no keys"},
    [OPT_CAUSAL] = {"causal", KIND_FLAG, AT(causal), SHARED, "", 0, 0, "off", "no query sees a later key"},
    [OPT_WINDOW] = {"window", KIND_WINDOW, AT(window), SHARED, "L,R", -1, LARGE, "off",
                    "keys from x - L to x + R only, -1 = no limit"},
    [OPT_KEY_RANGE] = {"key-range", KIND_RANGE, AT(key_range), SHARED, "B:E", 0, LARGE, "off",
                       "keys from B up to but not E only"},
    [OPT_SCALE] = {"scale", KIND_REAL, AT(scale), SHARED, "S", 0, 0, "1/sqrt(D)", "factor of the scores", EXPLAINING},
    [OPT_DROPOUT] = {"dropout", KIND_REAL, AT(dropout), SHARED, "P", 0, 0, "0", "share of pairs dropped, 0 <= P < 1",
                     EXPLAINING},
    [OPT_SEED] = {"seed", KIND_SEED, AT(seed), COMPUTING | SHARED, "N", 0, 0, "0", "seed of dropout and of generated data",
                  EXPLAINING},
    [OPT_RING_SIZE] = {"ring-size", KIND_INTEGER, AT(ring_size), SHARED, "P", 1, 1 << 16, "1",
                       "ranks, when not under a launcher"},
    [OPT_LAYOUT] = {"layout", KIND_CHOICE, AT(layout), SHARED, "auto|contiguous|zigzag|striped", 0, 0,
                    "auto for files, else contiguous", "which rows a rank holds; auto: the best balance"},
    [OPT_QUERY_PLACEMENT] = {"query-placement", KIND_CHOICE, AT(query_placement), SHARED, "sharded|replicated", 0, 0, "sharded",
                             "queries by rows, or all of them on every rank"},
    [OPT_SCHEDULE] = {"schedule", KIND_CHOICE, AT(schedule), SHARED, "auto|ring|gather|merge", 0, 0, "auto",
                      "how queries and keys meet: auto is fast, ring is small"},
    [OPT_BUCKET] = {"bucket", KIND_INTEGER, AT(bucket), SHARED, "ROWS", 1, LARGE, "auto", "K/V rows that travel at a time"},
    [OPT_TRANSPORT] = {"transport", KIND_CHOICE, AT(transport), SHARED, "auto|self|threads|mpi", 0, 0, "auto",
                       "what carries messages", EXPLAINING, "nccl"},
    [OPT_DEVICE] = {"device", KIND_CHOICE, AT(device), SHARED, "auto|cpu|cuda", 0, 0, "auto", "where to compute", PICTURING},
    [OPT_DTYPE] = {"dtype", KIND_CHOICE, AT(dtype), SHARED, "f32|bf16|f16|f64", 0, 0,
                   "that of the input, f32 for generated data", "what is computed; inputs are converted", PICTURING},
    [OPT_KERNEL] = {"kernel", KIND_CHOICE, AT(kernel), COMPUTING | SHARED, "auto|scalar|neon|avx2|avx512|amx|cuda|sm80|sm90a",
                    0, 0, "auto, or RINGATTN_KERNEL", "kernel family", PICTURING},
    [OPT_THREADS] = {"threads", KIND_INTEGER, AT(threads), COMPUTING | SHARED, "N", 1, 4096, "max(1, cores / ranks)",
                     "worker threads a rank", PICTURING},
    [OPT_TIMEOUT] = {"timeout", KIND_REAL, AT(timeout), COMPUTING | SHARED, "SECONDS", 0, 0, "60",
                     "silence before a peer counts as lost", EXPLAINING},
    [OPT_START_TIMEOUT] = {"start-timeout", KIND_REAL, AT(start_timeout), COMPUTING | SHARED, "SECONDS", 0, 0, "600",
                           "time for every rank to arrive", EXPLAINING},
    [OPT_CALL_TIMEOUT] = {"call-timeout", KIND_REAL, AT(call_timeout), COMPUTING | SHARED, "SECONDS", 0, 0, "none",
                          "time that one call may take, with ranks that all live", EXPLAINING},
    [OPT_MEMORY_LIMIT] = {"memory-limit", KIND_BYTES, AT(memory_limit), COMPUTING | SHARED, "BYTES", 1, 0, "none",
                          "what a rank may hold (K, M, G), mapped files not counted"},
    [OPT_CHECKSUM] = {"checksum", KIND_FLAG, AT(checksum), COMPUTING | SHARED, "", 0, 0, "off", "CRC32C over payloads",
                      EXPLAINING},
    [OPT_OFFLOAD] = {"offload", KIND_FLAG, AT(offload), SHARED, "", 0, 0, "off", "CUDA: K/V shards stay in host memory",
                     SHARED},
    [OPT_TRACE] = {"trace", KIND_FILE, AT(trace), COMPUTING | SHARED, "FILE", 0, 0, "none", "writes a timeline for Perfetto",
                   EXPLAINING},

    [OPT_JSON] = {"json", KIND_FLAG, AT(json), EVERY, "", 0, 0, "", "prints one JSON object"},
    [OPT_HELP] = {"help", KIND_FLAG, AT(help), EVERY | ONLY(COMPLETION) | ONLY(MAN), "", 0, 0, "", "prints this help"},
};
