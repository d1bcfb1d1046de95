package criu

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	// maxSummary bounds a summary, in bytes.
	maxSummary = 300
	// maxLogTail is how much of a log's end is read for its errors.
	maxLogTail = 1 << 20
)

// Error is a dump or restore that failed.
type Error struct {
	// Op is "dump", "restore" or "check".
	Op string
	// Summary is what CRIU's log says of the cause, on one line.
	Summary string
	// Log is the path of CRIU's log; empty if there is none.
	Log string
	// Err is of an errdefs class: FailedPrecondition if CRIU refuses something
	// in the tree, and the state of the tree would have to change; NotFound if
	// the tree is gone; AlreadyExists if a pid is taken; else Internal.
	Err error
}

// Error describes the failure and says where to read on.
func (e *Error) Error() string {
	s := "criu " + e.Op + ": " + e.Summary
	if e.Log != "" {
		s += "; log: " + e.Log
	}
	return s
}

// Unwrap returns the class.
func (e *Error) Unwrap() error {
	return e.Err
}

// refusals are the errors by which CRIU says that it cannot dump something that
// is in the tree, rather than that something broke. Where CRIU's words need it,
// means says it in others.
var refusals = []struct {
	pattern *regexp.Regexp
	means   string
}{
	{regexp.MustCompile(`^Can't dump nested \w+ namespace`), ""},
	{regexp.MustCompile(`^send_fds failed \(-22\)`), "an open file cannot be passed on, as an io_uring cannot"},
	{regexp.MustCompile(`\(anon_inode:\[io_uring\]\)`), "an io_uring is mapped"},
	{regexp.MustCompile(`Can't dump half of stream unix connection`), "a unix socket is connected to a process outside"},
	{regexp.MustCompile(`Unix socket .* without peer`), "a unix socket is connected to a process outside"},
	{regexp.MustCompile(`Unsupported proto 262`), "an MPTCP socket is open (net.mptcp.enabled=0 prevents it)"},
	{regexp.MustCompile(`Unsupported (proto|type|socket)`), ""},
	{regexp.MustCompile(`^Can't dump ghost file`), ""},
	{regexp.MustCompile(`ctty inheritance detected`), "a shell holds /dev/tty open while another command has its terminal's foreground"},
	{regexp.MustCompile(`^SysVIPC shmem map|with SysVIPC shmem map`), "SysV shared memory is of an ipc namespace that is not dumped"},
	{regexp.MustCompile(`mqueue isn't empty`), "a POSIX message queue is in use"},
	{regexp.MustCompile(`^Can't lookup mount=`), "a file is open on a mount that the tree does not have"},
	{regexp.MustCompile(`fsnotify: Can't dump that handle`), "a watched file cannot be found by its inode"},
	{regexp.MustCompile(`^Can't create link remap`), ""},
	{regexp.MustCompile(`^Some file locks are hold`), ""},
	{regexp.MustCompile(`^Connected TCP socket`), ""},
}

// logLine matches an error in a log: an optional time, what runs in the task
// ("pie"), the pid in the tree, the place in the source.
var logLine = regexp.MustCompile(`^(?:\(\d+\.\d+\))?\s*(?:pie:\s*)?(?:\d+:\s*)?Error \([^)]*\):\s*(.*?)\s*$`)

var (
	// harmless matches errors that do not make CRIU fail. The first is there
	// whenever CAP_SYS_RESOURCE is missing, and is what CRIU's answer names.
	harmless = regexp.MustCompile(`^rlimit: Can't setup RLIMIT_NOFILE`)
	// vague matches errors that only repeat that there was one.
	vague = regexp.MustCompile(`^(Dumping|Restoring) FAILED|failed with -1$`)
)

// newError explains a request that CRIU answered with a failure.
func newError(c *call, errno int32, message string) error {
	e := &Error{Op: c.op, Err: errdefs.ErrInternal}
	if f, err := openTail(c.log); err == nil {
		defer f.Close()
		e.Log = c.log
		var refused bool
		if e.Summary, refused = summarize(f); refused {
			e.Err = errdefs.ErrFailedPrecondition
			return e
		}
	}
	if harmless.MatchString(logLine.ReplaceAllString(message, "$1")) {
		message = ""
	}
	e.Summary = orElse(orElse(e.Summary, cut(message)), "failed for an unknown reason")
	if unix.Errno(errno) == unix.EEXIST {
		e.Err = errdefs.ErrAlreadyExists
	}
	return e
}

// brokenError explains a request to which no proper answer came.
func brokenError(c *call, err error, printed string) error {
	summary := err.Error()
	if last := strings.TrimSpace(printed); last != "" {
		summary += ": " + cut(last[strings.LastIndexByte(last, '\n')+1:])
	}
	if _, serr := os.Stat(c.log); errors.Is(serr, os.ErrNotExist) {
		return &Error{Op: c.op, Summary: summary, Err: err}
	}
	return &Error{Op: c.op, Summary: summary, Log: c.log, Err: err}
}

// openTail opens a log at the place from which on it is read.
func openTail(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	st, err := f.Stat()
	if err == nil && st.Size() > maxLogTail {
		_, err = f.Seek(-maxLogTail, io.SeekEnd)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open log: %w", err)
	}
	return f, nil
}

// summarize joins the errors of a log, beginning with the first that matters:
// it names the cause, and those that follow name what failed for it. A refusal
// is always the cause.
func summarize(log io.Reader) (summary string, refused bool) {
	var errs, vagueErrs []string
	scan := bufio.NewScanner(log)
	scan.Buffer(nil, maxLogTail)
	for scan.Scan() {
		m := logLine.FindStringSubmatch(scan.Text())
		switch {
		case m == nil || harmless.MatchString(m[1]):
		case vague.MatchString(m[1]):
			vagueErrs = append(vagueErrs, m[1])
		default:
			errs = append(errs, m[1])
		}
	}
	for _, text := range errs {
		for _, r := range refusals {
			if r.pattern.MatchString(text) {
				if r.means != "" {
					text = r.means + ": " + text
				}
				return cut(text), true
			}
		}
	}
	if len(errs) == 0 {
		errs = vagueErrs
	}
	return cut(strings.Join(errs, "; ")), false
}

// cut shortens s to what a summary may hold.
func cut(s string) string {
	if len(s) <= maxSummary {
		return s
	}
	return strings.ToValidUTF8(s[:maxSummary-3], "") + "..."
}
