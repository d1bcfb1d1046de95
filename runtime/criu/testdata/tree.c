// A process tree that a test dumps and restores. Its root answers one line on
// its standard output for each line on its standard input:
//
//	sum	a checksum of its memory, how often it was asked, its children's state
//	fire	wait for the timer to expire, say how often it did
//	say	print a line on the terminal
//
// Arguments: a kind and a size in MiB. The kind names what is in the tree
// beside memory: a child's namespace (the table below), or a file of the root's
// (see prepare), or nothing.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <unistd.h>

static const struct {
	const char *name;
	int flag;
} namespaces[] = {
	{ "user", CLONE_NEWUSER }, { "pid", CLONE_NEWPID }, { "uts", CLONE_NEWUTS },
	{ "ipc", CLONE_NEWIPC },   { "net", CLONE_NEWNET }, { "cgroup", CLONE_NEWCGROUP },
};

static void die(const char *what)
{
	perror(what);
	exit(1);
}

// child waits in the tree; its memory and pipe are part of it.
static void child(const char *kind, int in, int out)
{
	char c = 'r';
	size_t i;

	for (i = 0; i < sizeof namespaces / sizeof *namespaces; i++) {
		if (strcmp(kind, namespaces[i].name))
			continue;
		if (unshare(namespaces[i].flag))
			die("unshare");
		if (namespaces[i].flag == CLONE_NEWPID && fork() == 0)
			for (;;)
				pause();
	}
	if (write(out, &c, 1) != 1)
		die("write");
	while (read(in, &c, 1) == 1) {
		c++;
		if (write(out, &c, 1) != 1)
			die("write");
	}
	exit(0);
}

static int timer(void)
{
	struct itimerspec t = { { 0, 20000000 }, { 0, 20000000 } };
	struct pollfd p;

	p.fd = timerfd_create(CLOCK_MONOTONIC, 0);
	p.events = POLLIN;
	if (p.fd < 0 || timerfd_settime(p.fd, 0, &t, NULL))
		die("timerfd");
	if (poll(&p, 1, -1) != 1) // expired, and not read
		die("poll");
	return p.fd;
}

// expirations waits for the timer's expirations that come after the present
// ones.
static unsigned long long expirations(int fd)
{
	struct pollfd p = { fd, POLLIN, 0 };
	uint64_t n;

	if (read(fd, &n, sizeof n) != sizeof n)
		die("read");
	if (poll(&p, 1, 10000) != 1)
		return 0;
	if (read(fd, &n, sizeof n) != sizeof n)
		die("read");
	return n;
}

// connected returns a socket whose peer is outside the tree.
static int connected(void)
{
	struct sockaddr_un a = { AF_UNIX, "" };
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	char c;

	strncpy(a.sun_path, getenv("SOCKET"), sizeof a.sun_path - 1);
	if (connect(fd, (struct sockaddr *)&a, sizeof a) || read(fd, &c, 1) != 1)
		die("connect");
	return fd;
}

// ghost returns a file without a name.
static int ghost(void)
{
	static char data[2 << 20];
	int fd = open(".", O_RDWR | O_TMPFILE, 0600);

	memset(data, 1, sizeof data);
	if (fd >= 0 && write(fd, data, sizeof data) != sizeof data)
		die("write");
	return fd;
}

// uring returns an io_uring, with its queue mapped if asked for.
static int uring(int mapped)
{
	struct io_uring_params p = { 0 };
	int fd = syscall(SYS_io_uring_setup, 4, &p);

	if (fd >= 0 && mapped &&
	    mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_SQ_RING) == MAP_FAILED)
		die("mmap");
	return fd;
}

// sysv attaches shared memory, which lives in an ipc namespace.
static int sysv(void)
{
	int id = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);

	if (id < 0 || shmat(id, NULL, 0) == (void *)-1 || shmctl(id, IPC_RMID, NULL))
		die("shm");
	return 0;
}

static int prepare(const char *kind)
{
	int fd;

	if (!strcmp(kind, "uring") || !strcmp(kind, "mapped-uring"))
		fd = uring(*kind == 'm');
	else if (!strcmp(kind, "timer"))
		fd = timer();
	else if (!strcmp(kind, "terminal"))
		fd = open(getenv("TERMINAL"), O_RDWR); // and becomes the controlling one
	else if (!strcmp(kind, "ghost"))
		fd = ghost();
	else if (!strcmp(kind, "socket"))
		fd = connected();
	else if (!strcmp(kind, "mptcp"))
		fd = socket(AF_INET, SOCK_STREAM, IPPROTO_MPTCP);
	else if (!strcmp(kind, "sysv"))
		fd = sysv();
	else
		return -1;
	if (fd < 0)
		die(kind);
	return fd;
}

int main(int argc, char **argv)
{
	size_t i, size = strtoul(argv[2], NULL, 10) << 20, n = size / sizeof(uint64_t);
	int in[2], out[2], fd;
	unsigned asked = 0;
	uint64_t *mem, sum, x = 88172645463325252ull ^ getppid() ^ size;
	char line[64], c;

	if (pipe(in) || pipe(out))
		die("pipe");
	if (fork() == 0) {
		close(in[1]);
		close(out[0]);
		child(argv[1], in[0], out[1]);
	}
	close(in[0]);
	close(out[1]);
	if (read(out[0], &c, 1) != 1)
		die("child");
	mem = mmap(NULL, size + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mem == MAP_FAILED)
		die("mmap");
	for (i = 0; i < n; i++) {
		x ^= x << 13, x ^= x >> 7, x ^= x << 17;
		mem[i] = x;
	}
	fd = prepare(argv[1]);
	c = 'a';
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin)) {
		if (!strcmp(line, "sum\n")) {
			if (write(in[1], &c, 1) != 1 || read(out[0], &c, 1) != 1)
				die("child");
			for (sum = i = 0; i < n; i++)
				sum = sum * 31 + mem[i];
			printf("%llx %u %d\n", (unsigned long long)sum, ++asked, c);
		} else if (!strcmp(line, "fire\n")) {
			printf("%llu\n", expirations(fd));
		} else if (!strcmp(line, "say\n")) {
			dprintf(fd, "hello\n");
			puts("said");
		}
		fflush(stdout);
	}
	return 0;
}
