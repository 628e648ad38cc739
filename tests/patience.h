/* How long tests wait. */
#ifndef RA_TESTS_PATIENCE_H
#define RA_TESTS_PATIENCE_H

/* A timeout must be longer than a busy machine can keep a live rank from running; sanitizers make every rank slower. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define PATIENCE 4
#endif
#elif defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define PATIENCE 4
#endif
#ifndef PATIENCE
#define PATIENCE 1
#endif

#endif
