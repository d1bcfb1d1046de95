//go:build linux && (amd64 || arm64)

/*
 * The launcher: a whole program that is linked into this binary but never runs
 * in it. Its bytes are the section LAUNCHER, which File wraps into an ELF file.
 *
 * Nothing outside of that section is there when it runs: no libc, no data, no
 * strings. So everything is inlined into one function, there is no initialized
 * data, and loops that a compiler takes for memcpy or strlen hold a barrier.
 * TestSection holds compilers to that.
 *
 *	argv[0]  whatever the program was executed by
 *	argv[1]  <m|o><t|->NOTIFY{,TO=FROM}: monitor or orphan, terminal or not, the
 *	         descriptors; ascending by TO
 *	argv[2]  the command; if it has no slash it is looked for in PATH
 *	argv[3]  the command's own argv, from its argv[0] on
 */

#include <asm/ioctls.h>
#include <asm/unistd.h>
#include <linux/errno.h>
#include <linux/fcntl.h>

#define SECTION "statefork_launch"
/* Stack protectors and sanitizers call into libraries; vectors are constants in other sections. */
#define ALONE __attribute__((section(SECTION), used, noinline, no_sanitize("address"), target("general-regs-only")))
#define INLINE static inline __attribute__((always_inline, unused, no_sanitize("address"), target("general-regs-only")))
#define BARRIER() __asm__ volatile("" ::: "memory")

#if defined(__x86_64__)

INLINE long call(long n, long a, long b, long c, long d, long e)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	long r;

	__asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
	return r;
}

/* The kernel enters with argc, argv and envp on the stack, which is the argument. */
__asm__(".pushsection " SECTION ",\"ax\",@progbits\n"
	".globl statefork_launch_entry\n.hidden statefork_launch_entry\n.type statefork_launch_entry, @function\n"
	"statefork_launch_entry:\n"
	"	xorl %ebp, %ebp\n"
	"	movq %rsp, %rdi\n"
	"	andq $-16, %rsp\n"
	"	call statefork_launch_main\n"
	"	ud2\n"
	".popsection\n");

#elif defined(__aarch64__)

INLINE long call(long n, long a, long b, long c, long d, long e)
{
	register long x8 __asm__("x8") = n;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;

	__asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
	return x0;
}

__asm__(".pushsection " SECTION ",\"ax\",%progbits\n"
	".globl statefork_launch_entry\n.hidden statefork_launch_entry\n.type statefork_launch_entry, %function\n"
	"statefork_launch_entry:\n"
	"	mov x29, #0\n"
	"	mov x30, #0\n"
	"	mov x0, sp\n"
	"	bl statefork_launch_main\n"
	"	brk #0\n"
	".popsection\n");

#endif

/* From <linux/signal.h>, <linux/prctl.h> and <linux/sched.h>, which clash with each other or are long. */
enum { SIGS = 64, CHLD = 17, UNBLOCK_ALL = 0, MASK_SET = 2, DUMPABLE_SET = 4, NAME_SET = 15 };

/* What a message says; launch.go knows the same numbers. */
enum stage { READY, FORK, SESSION, FILES, TERMINAL, EXEC };

/* TTY is where the command's terminal is: a shell may read its commands from 0 and write what they say to 1. */
enum { TTY = 2 };

enum { MAX_FILES = 64, PATH_SIZE = 4096, UNDONE = 125, FORBIDDEN = 126, MISSING = 127 };

#define ALL_FILES (1L << 32)

struct plan {
	int monitor, terminal, notify, files;
	int tty; /* where TTY comes from */
	int to[MAX_FILES], from[MAX_FILES];
	char **argv, **envp;
};

INLINE void leave(int code)
{
	for (;;)
		call(__NR_exit_group, code, 0, 0, 0, 0);
}

INLINE void say(int notify, enum stage stage, long error)
{
	int message[2];

	message[0] = stage;
	message[1] = (int)-error;
	/* Not sendmsg: write is what no seccomp profile forbids. */
	call(__NR_write, notify, (long)message, sizeof(message), 0, 0);
}

/* fail reports an error, and ends with the code that shells use for it. */
INLINE void fail(int notify, enum stage stage, long error)
{
	say(notify, stage, error);
	leave(error == -ENOENT ? MISSING : FORBIDDEN);
}

INLINE int number(char **s)
{
	int n = 0;

	for (; **s >= '0' && **s <= '9'; ++*s)
		n = n * 10 + **s - '0';
	return n;
}

INLINE void parse(struct plan *p, long *stack)
{
	char *s;

	p->argv = (char **)(stack + 1);
	p->envp = p->argv + stack[0] + 1;
	if (stack[0] < 4)
		leave(UNDONE);
	s = p->argv[1];
	p->monitor = *s++ == 'm';
	p->terminal = *s++ == 't';
	p->notify = number(&s);
	p->tty = -1;
	for (p->files = 0; *s == ',' && p->files < MAX_FILES; p->files++) {
		s++;
		p->to[p->files] = number(&s);
		s++;
		p->from[p->files] = number(&s);
		if (p->to[p->files] == TTY)
			p->tty = p->from[p->files];
	}
	if (*s)
		leave(UNDONE);
}

INLINE void set_mask(unsigned long mask)
{
	call(__NR_rt_sigprocmask, MASK_SET, (long)&mask, 0, sizeof(mask), 0);
}

/* close_files closes those below end from first on; kernels or profiles may not know close_range. */
INLINE void close_files(long first, long end)
{
	if (first >= end || call(__NR_close_range, first, end - 1, 0, 0, 0) == 0)
		return;
	for (; first < end && first < 1024; first++)
		call(__NR_close, first, 0, 0, 0, 0);
}

/*
 * move_files gives the command its descriptors, and no other but notify, which
 * is moved out of the way and ends with exec. Every source is first copied
 * above all numbers in use: a target may be the source of another one, and a
 * copy must not take the place of a source that is missing.
 */
INLINE void move_files(struct plan *p)
{
	int top = p->notify, next = 0, i;
	long fd;

	for (i = 0; i < p->files; i++) {
		top = p->to[i] > top ? p->to[i] : top;
		top = p->from[i] > top ? p->from[i] : top;
	}
	top++;
	fd = call(__NR_fcntl, p->notify, F_DUPFD_CLOEXEC, top, 0, 0);
	if (fd < 0)
		fail(p->notify, FILES, fd);
	p->notify = (int)fd;
	for (i = 0; i < p->files; i++) {
		fd = call(__NR_fcntl, p->from[i], F_DUPFD_CLOEXEC, top, 0, 0);
		if (fd < 0)
			fail(p->notify, FILES, fd);
		p->from[i] = (int)fd;
	}
	for (i = 0; i < p->files; i++) {
		fd = call(__NR_dup3, p->from[i], p->to[i], 0, 0, 0);
		if (fd < 0)
			fail(p->notify, FILES, fd);
		close_files(next, p->to[i]);
		next = p->to[i] + 1;
	}
	close_files(next, p->notify);
	close_files(p->notify + 1, ALL_FILES);
}

/* join writes "dir/name" into path, where dir ends with a colon or the string. */
INLINE int join(char *path, const char *dir, const char *name)
{
	int n = 0;

	for (; *dir && *dir != ':' && n < PATH_SIZE - 2; n++, dir++) {
		path[n] = *dir;
		BARRIER();
	}
	path[n++] = '/';
	for (; *name && n < PATH_SIZE - 1; n++, name++) {
		path[n] = *name;
		BARRIER();
	}
	path[n] = 0;
	return !*name;
}

/*
 * exec returns only with an error. Of PATH only absolute directories count: the
 * OCI runtimes refuse a program found relative to the working directory.
 */
INLINE long exec(char *name, char **argv, char **envp)
{
	char path[PATH_SIZE], **env, *s;
	long error, worst = -ENOENT;

	for (s = name; *s; s++)
		if (*s == '/')
			return call(__NR_execve, (long)name, (long)argv, (long)envp, 0, 0);
	for (env = envp; *env; env++) {
		s = *env;
		if (!*name || s[0] != 'P' || s[1] != 'A' || s[2] != 'T' || s[3] != 'H' || s[4] != '=')
			continue;
		for (s += 5; *s; s += *s == ':') {
			if (*s == '/' && join(path, s, name)) {
				error = call(__NR_execve, (long)path, (long)argv, (long)envp, 0, 0);
				if (error == -EACCES)
					worst = error;
				else if (error != -ENOENT && error != -ENOTDIR)
					return error;
			}
			while (*s && *s != ':')
				s++;
		}
		break;
	}
	return worst;
}

/* become turns the forked process into the command. */
INLINE void become(struct plan *p)
{
	long r;
	char go;

	say(p->notify, READY, 0);
	if ((r = call(__NR_setsid, 0, 0, 0, 0, 0)) < 0)
		fail(p->notify, SESSION, r);
	move_files(p);
	if (p->terminal && (r = call(__NR_ioctl, TTY, TIOCSCTTY, 0, 0, 0)) < 0)
		fail(p->notify, TERMINAL, r);
	/* Whoever was told wants to know the process before it can end: wait for one byte. */
	if (call(__NR_read, p->notify, (long)&go, 1, 0, 0) != 1)
		leave(FORBIDDEN);
	set_mask(UNBLOCK_ALL);
	fail(p->notify, EXEC, exec(p->argv[2], p->argv + 3, p->envp));
}

/*
 * hide keeps the monitor from being taken for the command by what looks for that
 * by name or arguments. A memory file's name would be its descriptor's number.
 */
INLINE void hide(char **argv)
{
	unsigned long name[2]; /* "statefork", as both byte orders are little */

	name[0] = 0x726f666574617473;
	name[1] = 'k';
	call(__NR_prctl, NAME_SET, (long)name, 0, 0, 0);
	for (; *argv; argv++)
		for (char *s = *argv; *s; s++) {
			*s = 0;
			BARRIER();
		}
}

/* monitor ends as the command ends. All signals are blocked. */
INLINE void monitor(long pid, char **argv)
{
	int status = 0, sig;
	long r;

	close_files(0, ALL_FILES);
	hide(argv + 1);
	do
		r = call(__NR_wait4, pid, (long)&status, 0, 0, 0);
	while (r == -EINTR);
	if (r < 0)
		leave(UNDONE);
	sig = status & 0x7f;
	if (sig) {
		set_mask(~(1UL << (sig - 1)));
		call(__NR_kill, call(__NR_getpid, 0, 0, 0, 0, 0), sig, 0, 0, 0);
		leave(128 + sig);
	}
	leave(status >> 8 & 0xff);
}

ALONE __attribute__((visibility("hidden"))) void statefork_launch_main(long *stack)
{
	unsigned long action[4];
	struct plan p;
	long pid;
	int i;

	parse(&p, stack);
	/*
	 * Neither a core of the monitor, nor a process of the same user that takes
	 * notify away from it. Exec sets it anew for the command.
	 */
	call(__NR_prctl, DUMPABLE_SET, 0, 0, 0, 0);
	set_mask(~0UL);
	/* SIGCHLD too: while it is ignored there is nothing to wait for. */
	for (i = 0; i < 4; i++) {
		action[i] = 0;
		BARRIER();
	}
	for (i = 1; i <= SIGS; i++)
		call(__NR_rt_sigaction, i, (long)action, 0, sizeof(long), 0);
	/*
	 * A terminal belongs to one session. If it is ours, because whoever made it
	 * has executed us, give it up. That SIGHUP is blocked.
	 */
	if (p.terminal)
		call(__NR_ioctl, p.tty, TIOCNOTTY, 0, 0, 0);
	pid = call(__NR_clone, CHLD, 0, 0, 0, 0);
	if (pid < 0)
		fail(p.notify, FORK, pid);
	if (pid == 0)
		become(&p);
	if (p.monitor)
		monitor(pid, p.argv);
	leave(0);
}
