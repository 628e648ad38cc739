/* The smallest use of the library: four queries with q = 0, whose output is the mean of all values. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <ringattn.h>

int main(void) {
    float q[4] = {0}, k[4] = {1, 2, 3, 4}, v[4] = {1, 2, 3, 6}, out[4], lse[4];
    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = 4;
    desc.heads = desc.head_dim = 1;
    ra_forward_args args = {.q = ra_tensor_bnhd(q, 4, 1, 1),
                            .k = ra_tensor_bnhd(k, 4, 1, 1),
                            .v = ra_tensor_bnhd(v, 4, 1, 1),
                            .out = ra_tensor_bnhd(out, 4, 1, 1),
                            .lse = ra_tensor_lse(lse, 4, 1)};
    if (strcmp(ra_version(), RA_VERSION_STRING) != 0) {
        fprintf(stderr, "header %s, library %s\n", RA_VERSION_STRING, ra_version());
        return 1;
    }
    if (ra_attention(&desc, &args) != RA_OK) {
        fprintf(stderr, "%s\n", ra_last_error());
        return 1;
    }
    for (int i = 0; i < 4; i++)
        if (fabsf(out[i] - 3.0f) > 1e-5f || fabsf(lse[i] - logf(4.0f)) > 1e-5f) {
            fprintf(stderr, "row %d: out %g, lse %g\n", i, (double)out[i], (double)lse[i]);
            return 1;
        }
    return 0;
}
