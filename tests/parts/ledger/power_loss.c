/* A diary of everything a process does to the files below WATCHED_DIRECTORY: what was written where, and what was synced.
 *
 * Loaded with LD_PRELOAD. Entries go to DIARY, each one a header and its data, in the order in which the calls returned. From it
 * the tests rebuild what a disk may hold after a power cut at any moment. Little is left out on purpose: calls that SQLite and
 * Python do not make on these files (mmap for data, writev, copy_file_range) end the process, so that nothing escapes unseen.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_FILES 4096

struct header {
    char kind;           /* c created, w write, t truncate, s sync, u unlink, r rename (data: the new path) */
    char unused[3];
    uint32_t path_bytes;
    uint64_t offset;
    uint64_t data_bytes;
};

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static char *path_of[MOST_FILES];
static char watched[PATH_MAX];
static int diary = -1;
static ssize_t (*real_write)(int, const void *, size_t);

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

__attribute__((constructor)) static void begin(void) {
    const char *directory = getenv("WATCHED_DIRECTORY"), *file = getenv("DIARY");
    real_write = real("write");
    if (!directory || !file || !realpath(directory, watched)) return;
    int (*real_open)(const char *, int, ...) = real("open");
    diary = real_open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static void note(char kind, const char *path, uint64_t offset, const void *data, uint64_t data_bytes) {
    struct header header = {.kind = kind, .path_bytes = strlen(path), .offset = offset, .data_bytes = data_bytes};
    real_write(diary, &header, sizeof header);
    real_write(diary, path, header.path_bytes);
    if (data_bytes) real_write(diary, data, data_bytes);
}

static int is_watched(const char *path, char *whole) {
    char parent[PATH_MAX], *name;
    if (diary < 0 || strlen(path) >= PATH_MAX) return 0;
    strcpy(parent, path);
    name = strrchr(parent, '/');
    if (!name) return 0;
    if (realpath(path, whole)) return strncmp(whole, watched, strlen(watched)) == 0;
    *name = 0;
    if (!realpath(*parent ? parent : "/", whole)) return 0;
    strncat(whole, path + (name - parent), PATH_MAX - strlen(whole) - 1);
    return strncmp(whole, watched, strlen(watched)) == 0;
}

static int opened(int (*open_it)(const char *, int, ...), const char *path, int flags, mode_t mode) {
    char whole[PATH_MAX];
    int here = is_watched(path, whole), existed = access(path, F_OK) == 0;
    pthread_mutex_lock(&turn);
    int fd = open_it(path, flags, mode);
    if (fd >= 0 && fd < MOST_FILES) {
        free(path_of[fd]);
        path_of[fd] = here ? strdup(whole) : NULL;
        if (here && !existed) note('c', whole, 0, NULL, 0);
        if (here && existed && (flags & O_TRUNC)) note('t', whole, 0, NULL, 0);
    }
    pthread_mutex_unlock(&turn);
    return fd;
}

static mode_t mode_in(int flags, va_list rest) { return (flags & O_CREAT) ? va_arg(rest, int) : 0; }

int open(const char *path, int flags, ...) {
    va_list rest; va_start(rest, flags); mode_t mode = mode_in(flags, rest); va_end(rest);
    return opened(real("open"), path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    va_list rest; va_start(rest, flags); mode_t mode = mode_in(flags, rest); va_end(rest);
    return opened(real("open64"), path, flags, mode);
}

int close(int fd) {
    int (*real_close)(int) = real("close");
    pthread_mutex_lock(&turn);
    if (fd >= 0 && fd < MOST_FILES && path_of[fd]) { free(path_of[fd]); path_of[fd] = NULL; }
    int result = real_close(fd);
    pthread_mutex_unlock(&turn);
    return result;
}

static const char *known(int fd) { return fd >= 0 && fd < MOST_FILES ? path_of[fd] : NULL; }

static ssize_t placed(ssize_t (*write_it)(int, const void *, size_t, off_t), int fd, const void *data, size_t n, off_t at) {
    if (!known(fd)) return write_it(fd, data, n, at);
    pthread_mutex_lock(&turn);
    ssize_t written = write_it(fd, data, n, at);
    if (written > 0) note('w', known(fd), at, data, written);
    pthread_mutex_unlock(&turn);
    return written;
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) { return placed(real("pwrite"), fd, data, n, at); }
ssize_t pwrite64(int fd, const void *data, size_t n, off_t at) { return placed(real("pwrite64"), fd, data, n, at); }

static void note_parts(int fd, const struct iovec *parts, int n, off_t at, ssize_t left) {
    for (int i = 0; i < n && left > 0; i++) {
        ssize_t some = left < (ssize_t)parts[i].iov_len ? left : (ssize_t)parts[i].iov_len;
        if (some) note('w', known(fd), at, parts[i].iov_base, some);
        at += some;
        left -= some;
    }
}
static ssize_t gathered(const char *name, int fd, const struct iovec *parts, int n, off_t at) {
    ssize_t (*write_it)(int, const struct iovec *, int, off_t) = real(name);
    if (!known(fd)) return write_it(fd, parts, n, at);
    pthread_mutex_lock(&turn);
    ssize_t written = write_it(fd, parts, n, at);
    note_parts(fd, parts, n, at, written);
    pthread_mutex_unlock(&turn);
    return written;
}
static ssize_t gathered2(const char *name, int fd, const struct iovec *parts, int n, off_t at, int flags) {
    ssize_t (*write_it)(int, const struct iovec *, int, off_t, int) = real(name);
    if (!known(fd)) return write_it(fd, parts, n, at, flags);
    pthread_mutex_lock(&turn);
    ssize_t written = write_it(fd, parts, n, at, flags);
    note_parts(fd, parts, n, at, written);
    pthread_mutex_unlock(&turn);
    return written;
}
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t at) { return gathered("pwritev", fd, parts, n, at); }
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off_t at) { return gathered("pwritev64", fd, parts, n, at); }
ssize_t pwritev2(int fd, const struct iovec *parts, int n, off_t at, int flags) {
    return gathered2("pwritev2", fd, parts, n, at, flags);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int n, off_t at, int flags) {
    return gathered2("pwritev64v2", fd, parts, n, at, flags);
}

ssize_t write(int fd, const void *data, size_t n) {
    if (!known(fd)) return real_write(fd, data, n);
    pthread_mutex_lock(&turn);
    off_t at = (fcntl(fd, F_GETFL) & O_APPEND) ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
    ssize_t written = real_write(fd, data, n);
    if (written > 0) note('w', known(fd), at, data, written);
    pthread_mutex_unlock(&turn);
    return written;
}

static int cut(int (*cut_it)(int, off_t), int fd, off_t to) {
    pthread_mutex_lock(&turn);
    int result = cut_it(fd, to);
    if (result == 0 && known(fd)) note('t', known(fd), to, NULL, 0);
    pthread_mutex_unlock(&turn);
    return result;
}
int ftruncate(int fd, off_t to) { return cut(real("ftruncate"), fd, to); }
int ftruncate64(int fd, off_t to) { return cut(real("ftruncate64"), fd, to); }

static int synced(int (*sync_it)(int), int fd) {
    pthread_mutex_lock(&turn);
    int result = sync_it(fd);
    if (result == 0 && known(fd)) note('s', known(fd), 0, NULL, 0);
    pthread_mutex_unlock(&turn);
    return result;
}
int fsync(int fd) { return synced(real("fsync"), fd); }
int fdatasync(int fd) { return synced(real("fdatasync"), fd); }

int unlink(const char *path) {
    char whole[PATH_MAX];
    int (*real_unlink)(const char *) = real("unlink"), here = is_watched(path, whole);
    pthread_mutex_lock(&turn);
    int result = real_unlink(path);
    if (result == 0 && here) note('u', whole, 0, NULL, 0);
    pthread_mutex_unlock(&turn);
    return result;
}

int rename(const char *path, const char *target) {
    char whole[PATH_MAX], other[PATH_MAX];
    int (*real_rename)(const char *, const char *) = real("rename"), here = is_watched(path, whole);
    if (here && !is_watched(target, other)) strcpy(other, target);
    pthread_mutex_lock(&turn);
    int result = real_rename(path, target);
    if (result == 0 && here) note('r', whole, 0, other, strlen(other));
    pthread_mutex_unlock(&turn);
    return result;
}

static void unseen(const char *call) {
    fprintf(stderr, "ledger_power_loss: %s on a watched file is not in the diary\n", call);
    abort();
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
    ssize_t (*real_writev)(int, const struct iovec *, int) = real("writev");
    if (known(fd)) unseen("writev");
    return real_writev(fd, parts, n);
}
int posix_fallocate(int fd, off_t at, off_t n) {
    int (*real_call)(int, off_t, off_t) = real("posix_fallocate");
    if (known(fd)) unseen("posix_fallocate");
    return real_call(fd, at, n);
}
void *mmap(void *where, size_t n, int protection, int flags, int fd, off_t at) {
    void *(*real_mmap)(void *, size_t, int, int, int, off_t) = real("mmap");
    const char *path = known(fd), *end = path ? path + strlen(path) : NULL;
    /* The index of the write-ahead log (-shm) is rebuilt after a crash and never counted on. */
    if (path && (protection & PROT_WRITE) && !(end - path > 4 && strcmp(end - 4, "-shm") == 0)) unseen("mmap");
    return real_mmap(where, n, protection, flags, fd, at);
}
