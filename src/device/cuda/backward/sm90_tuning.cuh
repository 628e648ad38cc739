/* Choices of Hopper's backward kernel that are to be measured. Each is a macro, so that one tree builds all of them side by
 * side; the defaults are what has been measured last. Once a choice is made, it belongs into sm90.cuh and its macro goes.
 *
 * The results of RA_BACK_SUMS < 2 are wrong or differ from run to run: such builds only tell what ordered sums cost. */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_TUNING_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_TUNING_CUH

/* When products are issued:
 * 0  S, dP | exp, dS | dQ before, dV, dK
 * 1  S, dP | exp | dV | dS while dV runs | dQ before, dK
 * 2  as 1, and S and dP of the next block while dK runs, once dQ has left: the warpgroup's queue of products hardly runs dry
 * 3  as 2, but S before dQ has left: 32 registers more */
#ifndef RA_BACK_ORDER
#define RA_BACK_ORDER 1
#endif
/* From order 2 on: P and dS share registers, and dS is packed when dV is done. */
#ifndef RA_BACK_SHARE
#define RA_BACK_SHARE 0
#endif
/* The number of the warpgroup is told to be uniform: descriptors then live in uniform registers. */
#ifndef RA_BACK_UNIFORM
#define RA_BACK_UNIFORM 1
#endif
/* D = 64: query rows that are scored at a time, of blocks of 128. With 64 there are two halves of a block, in an order of their
 * own, and registers enough. */
#ifndef RA_BACK_SPAN
#define RA_BACK_SPAN 64
#endif
/* Query rows that are made weights and dS of at once (from order 1 on), at D = 64; otherwise always 64. */
#ifndef RA_BACK_PART
#define RA_BACK_PART 128
#endif
/* The turn of a block is handed on when the next block's sums are under way, not at once: the thread that adds then waits for
 * nobody's latency. */
#ifndef RA_BACK_DEFER
#define RA_BACK_DEFER 0
#endif
/* The turn of the next block is waited for before its dQ is, so that the latency of asking is hidden. */
#ifndef RA_BACK_ASK
#define RA_BACK_ASK 1
#endif
/* Causal: keys from first to last, the heaviest tiles first, and queries from last to first. */
#ifndef RA_BACK_DOWN
#define RA_BACK_DOWN 0
#endif
/* Steps of head start that the instances of a section give, see section_of. */
#ifndef RA_BACK_HEAD_START
#define RA_BACK_HEAD_START 3
#endif
/* Sums of dq: 2 in order, 1 in any order, 0 none. */
#ifndef RA_BACK_SUMS
#define RA_BACK_SUMS 2
#endif
/* Buffers of a warpgroup's part of dQ. */
#ifndef RA_BACK_DQ_BUFFERS
#define RA_BACK_DQ_BUFFERS 2
#endif
#ifndef RA_BACK_Q_STAGES
#define RA_BACK_Q_STAGES 2
#endif
#ifndef RA_BACK_DOUT_STAGES
#define RA_BACK_DOUT_STAGES 2
#endif
/* Registers of a thread that loads and of one that computes: together with twice the second at most 512. */
#ifndef RA_BACK_PRODUCER
#define RA_BACK_PRODUCER 56
#endif
#ifndef RA_BACK_CONSUMER
#define RA_BACK_CONSUMER 224
#endif
/* Clocks of each phase go to the end of the scratch memory, see sm90_clocks.cuh. */
#ifndef RA_BACK_CLOCKS
#define RA_BACK_CLOCKS 0
#endif

#endif
