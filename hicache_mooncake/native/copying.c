/* Copies a batch of pages and takes their checksums, without Python in between.
 *
 * Called through ctypes, which lets go of the interpreter lock, from one thread or several with the same arguments: each
 * takes the next job until there is none. XXH3 is that of the python-xxhash package, whose functions are handed in.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* Bytes copied before they are hashed; as in memory.py. */
#define PIECE ((uint64_t)512 << 10)

enum outcome { COPIED = 1, LATE = 2, REVOKED = 3 };

struct piece {
    uint64_t to, from, length;
};

struct job {
    uint64_t pieces;     /* how many pieces it has */
    uint64_t first;      /* index of the first one */
    uint64_t key;        /* offset of its key, whose own hash seeds the checksum */
    uint64_t key_length;
    uint64_t digest;     /* out */
    uint64_t outcome;    /* out */
};

struct xxh3 {
    uint64_t (*oneshot)(const void *, size_t, uint64_t);
    void *(*create)(void);
    int (*release)(void *);
    int (*reset)(void *, uint64_t);
    int (*update)(void *, const void *, size_t);
    uint64_t (*digest)(const void *);
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static uint64_t copy(const struct piece *pieces, uint64_t count, uint64_t seed, const struct xxh3 *hash, void *state)
{
    if (count == 1 && pieces->length <= PIECE) {
        memcpy((void *)(uintptr_t)pieces->to, (const void *)(uintptr_t)pieces->from, pieces->length);
        return hash->oneshot((const void *)(uintptr_t)pieces->to, pieces->length, seed);
    }
    hash->reset(state, seed);
    for (uint64_t at = 0; at < count; at++) {
        for (uint64_t done = 0; done < pieces[at].length; done += PIECE) {
            uint64_t left = pieces[at].length - done;
            uint64_t step = left < PIECE ? left : PIECE;
            void *to = (void *)(uintptr_t)(pieces[at].to + done);
            memcpy(to, (const void *)(uintptr_t)(pieces[at].from + done), step);
            hash->update(state, to, step);
        }
    }
    return hash->digest(state);
}

/* The fence (protocol/fence.py): `allowed` is read before a page is written to, and again after it was read from. The
 * barrier against the engine's side is the engine's own membarrier(2); here only the order of our accesses is kept. */
int hcm_copy(struct job *jobs, uint64_t count, const struct piece *pieces, const uint8_t *keys, uint64_t *next,
             const uint64_t *allowed, uint64_t request, int64_t deadline_ns, const struct xxh3 *hash)
{
    void *state = hash->create();
    if (state == NULL)
        return -1;
    for (;;) {
        uint64_t at = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (at >= count)
            break;
        struct job *job = &jobs[at];
        if (now_ns() > deadline_ns) {
            job->outcome = LATE;
            continue;
        }
        if (__atomic_load_n(allowed, __ATOMIC_ACQUIRE) != request) {
            job->outcome = REVOKED;
            continue;
        }
        uint64_t seed = hash->oneshot(keys + job->key, job->key_length, 0);
        job->digest = copy(&pieces[job->first], job->pieces, seed, hash, state);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        job->outcome = __atomic_load_n(allowed, __ATOMIC_RELAXED) == request ? COPIED : REVOKED;
    }
    hash->release(state);
    return 0;
}
