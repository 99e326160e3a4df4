/* Kills the process at a chosen step of a commit.
 *
 * A step is a call that others can see the effect of: a write to a regular file, a rename, a sync, or a
 * message to a server on a Unix socket, or to one on the port of dcp_steps_port(port). They are counted while dcp_steps_arm(kill_at) is in force; the
 * process dies before the step of that number is taken. Loaded with LD_PRELOAD.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_int armed;
static atomic_long seen;
static atomic_long kill_at = -1;
static atomic_int port;

void dcp_steps_port(int of_server)
{
    atomic_store(&port, of_server);
}

void dcp_steps_arm(long at)
{
    atomic_store(&kill_at, at);
    atomic_store(&armed, 1);
}

void dcp_steps_disarm(void)
{
    atomic_store(&armed, 0);
}

long dcp_steps_seen(void)
{
    return atomic_load(&seen);
}

static void step(void)
{
    if (!atomic_load(&armed))
        return;
    if (atomic_fetch_add(&seen, 1) + 1 == atomic_load(&kill_at))
        for (;;)
            kill(getpid(), SIGKILL);
}

static void step_on_socket(int fd);

static void step_on_file(int fd)
{
    int saved = errno;
    struct stat found;
    if (atomic_load(&armed) && fstat(fd, &found) == 0) {
        if (S_ISREG(found.st_mode))
            step();
        else if (S_ISSOCK(found.st_mode) && atomic_load(&port))
            step_on_socket(fd);
    }
    errno = saved;
}

static void step_on_socket(int fd)
{
    int saved = errno;
    struct sockaddr_storage name;
    socklen_t size = sizeof name;
    if (atomic_load(&armed) && getpeername(fd, (struct sockaddr *)&name, &size) == 0) {
        int is_server = name.ss_family == AF_INET
            && ntohs(((struct sockaddr_in *)&name)->sin_port) == atomic_load(&port);
        if (name.ss_family == AF_UNIX || is_server)
            step();
    }
    errno = saved;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define ON_FILE(result, name, parameters, arguments) \
    result name parameters                           \
    {                                                \
        step_on_file(fd);                            \
        return NEXT(name) arguments;                 \
    }
ON_FILE(ssize_t, write, (int fd, const void *from, size_t size), (fd, from, size))
ON_FILE(ssize_t, pwrite, (int fd, const void *from, size_t size, off_t at), (fd, from, size, at))
ON_FILE(ssize_t, pwrite64, (int fd, const void *from, size_t size, off64_t at), (fd, from, size, at))
ON_FILE(ssize_t, writev, (int fd, const struct iovec *from, int count), (fd, from, count))
ON_FILE(int, fsync, (int fd), (fd))
ON_FILE(int, fdatasync, (int fd), (fd))
ON_FILE(int, ftruncate, (int fd, off_t size), (fd, size))
ON_FILE(int, ftruncate64, (int fd, off64_t size), (fd, size))

#define ON_SOCKET(result, name, parameters, arguments) \
    result name parameters                             \
    {                                                  \
        step_on_socket(fd);                            \
        return NEXT(name) arguments;                   \
    }
ON_SOCKET(ssize_t, send, (int fd, const void *from, size_t size, int flags), (fd, from, size, flags))
ON_SOCKET(ssize_t, sendmsg, (int fd, const struct msghdr *from, int flags), (fd, from, flags))

#define ALWAYS(name, parameters, arguments) \
    int name parameters                     \
    {                                       \
        step();                             \
        return NEXT(name) arguments;        \
    }
ALWAYS(rename, (const char *from, const char *to), (from, to))
ALWAYS(renameat, (int at, const char *from, int onto, const char *to), (at, from, onto, to))
ALWAYS(renameat2, (int at, const char *from, int onto, const char *to, unsigned flags),
       (at, from, onto, to, flags))
ALWAYS(link, (const char *from, const char *to), (from, to))
ALWAYS(linkat, (int at, const char *from, int onto, const char *to, int flags),
       (at, from, onto, to, flags))
ALWAYS(unlink, (const char *path), (path))
ALWAYS(unlinkat, (int at, const char *path, int flags), (at, path, flags))
ALWAYS(mkdir, (const char *path, mode_t mode), (path, mode))

#define OPENING(name, parameters, arguments)       \
    int name parameters                            \
    {                                              \
        mode_t mode = 0;                           \
        if (flags & (O_CREAT | O_TMPFILE)) {       \
            va_list more;                          \
            va_start(more, flags);                 \
            mode = va_arg(more, mode_t);           \
            va_end(more);                          \
        }                                          \
        if (flags & O_CREAT)                       \
            step();                                \
        return NEXT(name) arguments;               \
    }
OPENING(open, (const char *path, int flags, ...), (path, flags, mode))
OPENING(open64, (const char *path, int flags, ...), (path, flags, mode))
OPENING(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPENING(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))
