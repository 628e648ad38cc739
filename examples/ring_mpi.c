/* One rank of a ring of processes: `mpirun -n 4 example_ring_mpi`. Started without a launcher it is a ring of one. The program
 * says nothing of MPI; the library loads the module of whichever MPI launched it. Every rank makes its own rows, and checks
 * that q = 0 averages v. */
#include <math.h>
#include <ringattn.h>
#include <ringattn_mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, ra_last_error());
    fflush(NULL);
    _exit(1); /* after a communication error MPI must not be finalized: that could wait for a dead rank */
}

int main(void) {
    enum { N = 4096, HEADS = 2, DIM = 32 };
    ra_comm *comm;
    ra_status status = ra_mpi_is_launched() ? ra_comm_mpi_world(60, &comm) : ra_comm_self(&comm);
    if (status != RA_OK) return fail("communicator");
    if (ra_comm_set_timeout(comm, 30, 60) != RA_OK) return fail("timeouts");

    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = N;
    desc.heads = HEADS;
    desc.head_dim = DIM;
    desc.causal = true;
    desc.layout = RA_LAYOUT_ZIGZAG; /* balances causal work */
    desc.schedule = RA_SCHEDULE_RING;
    ra_shard rows;
    ra_plan *plan;
    if (ra_shard_rows(&desc, ra_comm_rank(comm), ra_comm_size(comm), &rows, NULL) != RA_OK) return fail("rows");
    if (ra_plan_create(comm, &desc, &plan) != RA_OK) return fail("plan");

    size_t one = (size_t)(rows.count * HEADS * DIM);
    float *q = calloc(one, sizeof *q), *k = calloc(one, sizeof *k), *v = malloc(one * sizeof *v),
          *out = malloc(one * sizeof *out);
    if (!q || !k || !v || !out) return 1;
    int64_t local = 0;
    for (int run = 0; run < 2; run++)
        for (int64_t i = 0; i < rows.rows[run].count; i++, local++)
            for (int e = 0; e < HEADS * DIM; e++) v[local * HEADS * DIM + e] = (float)(rows.rows[run].start + i) / N;
#define TENSOR(x) ra_tensor_bnhd(x, rows.count, HEADS, DIM)
    if (ra_forward(plan, &(ra_forward_args){.q = TENSOR(q), .k = TENSOR(k), .v = TENSOR(v), .out = TENSOR(out)}) != RA_OK)
        return fail("forward");

    double worst = 0; /* row x sees keys 0..x, whose values average x/2N */
    local = 0;
    for (int run = 0; run < 2; run++)
        for (int64_t i = 0; i < rows.rows[run].count; i++, local++)
            worst = fmax(worst, fabs((double)out[local * HEADS * DIM] - (double)(rows.rows[run].start + i) / (2.0 * N)));
    printf("rank %d of %d over %s: %lld rows, largest error %.2g\n", ra_comm_rank(comm), ra_comm_size(comm),
           ra_comm_transport(comm), (long long)rows.count, worst);
    free(q), free(k), free(v), free(out);
    ra_plan_destroy(plan);
    ra_comm_destroy(comm);
    return worst > 1e-5;
}
