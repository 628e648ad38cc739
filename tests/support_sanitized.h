/* TEST_SANITIZED: 1 in a build with the address or the thread sanitizer, which is several times slower and has a heap of its
 * own. */
#ifndef RA_TESTS_SUPPORT_SANITIZED_H
#define RA_TESTS_SUPPORT_SANITIZED_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TEST_SANITIZED 1
#endif
#endif
#ifndef TEST_SANITIZED
#define TEST_SANITIZED 0
#endif

#endif
