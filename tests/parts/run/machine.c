/* Faults of a machine, switched on and off by a test while the processes run.
 *
 * Loaded with LD_PRELOAD. The file MACHINE_FAULTS holds a `struct faults` that every process maps: the shift of the system's clock,
 * and the error that every write to a file below MACHINE_DIRECTORY returns.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct faults {
    volatile int64_t clock_shift_s;
    volatile int64_t write_error;
};

static struct faults none, *faults = &none;
static const char *directory = "";

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("MACHINE_FAULTS");
    directory = getenv("MACHINE_DIRECTORY") ? getenv("MACHINE_DIRECTORY") : "";
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *mapped = mmap(NULL, sizeof(struct faults), PROT_READ, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) faults = mapped;
        close(file);
    }
}

static int is_refused_path(const char *path) {
    char full[PATH_MAX];
    if (!faults->write_error || !*directory) return 0;
    if (path[0] == '/') snprintf(full, sizeof full, "%s", path);
    else if (getcwd(full, sizeof full / 2)) { strcat(full, "/"); strncat(full, path, sizeof full - strlen(full) - 1); }
    else return 0;
    return strncmp(full, directory, strlen(directory)) == 0;
}

static int is_refused(int fd) {
    char link[64], path[PATH_MAX];
    struct stat status;
    int saved = errno, answer = 0;
    if (!faults->write_error) return 0;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, sizeof path - 1);
        if (length > 0) { path[length] = 0; answer = is_refused_path(path); }
    }
    errno = saved;
    return answer;
}

#define REFUSE(condition) do { if (condition) { errno = (int)faults->write_error; return -1; } } while (0)
#define REAL(result, name, parameters) \
    static result (*real) parameters; \
    if (!real) real = (result (*) parameters)dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t id, struct timespec *at) {
    REAL(int, clock_gettime, (clockid_t, struct timespec *));
    int answer = real(id, at);
    if (answer == 0 && id == CLOCK_REALTIME) at->tv_sec += faults->clock_shift_s;
    return answer;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, write, (int, const void *, size_t));
    REFUSE(is_refused(fd));
    return real(fd, data, size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(ssize_t, pwrite64, (int, const void *, size_t, off64_t));
    REFUSE(is_refused(fd));
    return real(fd, data, size, at);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, (int, const struct iovec *, int));
    REFUSE(is_refused(fd));
    return real(fd, parts, count);
}

int open64(const char *path, int flags, ...) {
    REAL(int, open64, (const char *, int, ...));
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    REFUSE((flags & (O_WRONLY | O_RDWR | O_CREAT)) && is_refused_path(path));
    return real(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return open64(path, flags, mode);
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, (const char *, mode_t));
    REFUSE(is_refused_path(path));
    return real(path, mode);
}

int rename(const char *from, const char *to) {
    REAL(int, rename, (const char *, const char *));
    REFUSE(is_refused_path(to));
    return real(from, to);
}

int unlink(const char *path) {
    REAL(int, unlink, (const char *));
    REFUSE(is_refused_path(path));
    return real(path);
}
