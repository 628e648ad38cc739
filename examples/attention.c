/* The shortest use: one call, one process. Causal attention with grouped-query heads, and the share of the first key in each
 * row. */
#include <ringattn.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    enum { N = 8, HEADS = 4, KV_HEADS = 2, DIM = 8 };
    float *q = calloc(N * HEADS * DIM, sizeof *q), *out = calloc(N * HEADS * DIM, sizeof *out);
    float *k = calloc(N * KV_HEADS * DIM, sizeof *k), *v = calloc(N * KV_HEADS * DIM, sizeof *v);
    float *lse = calloc(N * HEADS, sizeof *lse);
    if (!q || !k || !v || !out || !lse) return 1;
    for (int head = 0; head < KV_HEADS; head++) v[head * DIM] = 1; /* key 0 is marked, and q = 0 makes all keys equal */

    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = N;
    desc.heads = HEADS;
    desc.kv_heads = KV_HEADS;
    desc.head_dim = DIM;
    desc.causal = true;
    ra_forward_args args = {.q = ra_tensor_bnhd(q, N, HEADS, DIM),
                            .k = ra_tensor_bnhd(k, N, KV_HEADS, DIM),
                            .v = ra_tensor_bnhd(v, N, KV_HEADS, DIM),
                            .out = ra_tensor_bnhd(out, N, HEADS, DIM),
                            .lse = ra_tensor_lse(lse, N, HEADS)};
    if (ra_attention(&desc, &args) != RA_OK) {
        fprintf(stderr, "%s\n", ra_last_error());
        return 1;
    }
    int wrong = 0;
    for (int i = 0; i < N; i++) {
        float share = out[i * HEADS * DIM]; /* row i sees i + 1 keys */
        printf("row %d: key 0 has 1/%d = %.4f, lse %.4f\n", i, i + 1, (double)share, (double)lse[i]);
        wrong += !(share * (float)(i + 1) > 0.99999f && share * (float)(i + 1) < 1.00001f);
    }
    free(q), free(k), free(v), free(out), free(lse);
    return wrong != 0;
}
