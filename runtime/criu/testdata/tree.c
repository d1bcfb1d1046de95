// A process tree that a test dumps and restores. Its root answers one line on
// its standard output for each line on its standard input:
//
//	sum	a checksum of its memory, how often it was asked, its children's state
//	fire	wait for the timer to expire, say how often it did
//	say	print a line on the terminal
//
// Arguments: a kind and a size in MiB. The kind names what is in the tree
// beside memory: plain, uring, userns, timer, terminal, ghost, lock.
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <unistd.h>

static void die(const char *what)
{
	perror(what);
	exit(1);
}

// child waits in the tree; its memory and pipe are part of it.
static void child(const char *kind, int in, int out)
{
	char c;

	if (!strcmp(kind, "userns") && unshare(CLONE_NEWUSER))
		die("unshare");
	c = 'r';
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
	if (poll(&p, 1, 3000) != 1)
		return 0;
	if (read(fd, &n, sizeof n) != sizeof n)
		die("read");
	return n;
}

static int prepare(const char *kind)
{
	int fd;

	if (!strcmp(kind, "uring")) {
		char params[256] = { 0 };
		fd = syscall(SYS_io_uring_setup, 4, params);
	} else if (!strcmp(kind, "timer")) {
		fd = timer();
	} else if (!strcmp(kind, "terminal")) {
		fd = open(getenv("TERMINAL"), O_RDWR | O_NOCTTY);
	} else if (!strcmp(kind, "ghost")) {
		fd = open(".", O_RDWR | O_TMPFILE, 0600);
		if (fd >= 0 && ftruncate(fd, 2 << 20))
			die("ftruncate");
	} else if (!strcmp(kind, "unix")) {
		struct sockaddr_un a = { AF_UNIX, "" };
		strncpy(a.sun_path, getenv("SOCKET"), sizeof a.sun_path - 1);
		fd = socket(AF_UNIX, SOCK_STREAM, 0);
		if (connect(fd, (struct sockaddr *)&a, sizeof a))
			die("connect");
	} else {
		return -1;
	}
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
