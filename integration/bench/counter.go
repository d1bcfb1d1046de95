package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/statefork/statefork/integration/testbed"
)

// counter is the process that is measured: a shell of about one MiB which
// answers each line in the pipe q with how many there have been, in the pipe a,
// and writes that to the file count.
const counter = `mkfifo q a
exec 4<>a 3<>q
n=0
while read -r _ <&3; do
	n=$((n + 1))
	echo $n >count
	echo $n >&4
done`

const (
	answerWithin = 5 * time.Second
	startWithin  = 15 * time.Second
)

// ask has the counter count, and returns its answer.
func ask(pid int) (n int, retErr error) {
	defer func() {
		if retErr != nil {
			retErr = fmt.Errorf("ask process %d: %w", pid, retErr)
		}
	}()
	// Seen through the process, the path is right in any mount namespace.
	dir := filepath.Join("/proc", strconv.Itoa(pid), "cwd")
	// Opening q for writing fails until the counter reads it, and then a is open.
	q, err := os.OpenFile(filepath.Join(dir, "q"), os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return 0, err
	}
	defer q.Close()
	a, err := os.OpenFile(filepath.Join(dir, "a"), os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return 0, err
	}
	defer a.Close()
	if err := a.SetReadDeadline(time.Now().Add(answerWithin)); err != nil {
		return 0, err
	}
	if _, err := q.WriteString("\n"); err != nil {
		return 0, err
	}
	line, err := bufio.NewReader(a).ReadString('\n')
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(line))
}

// askFirst waits until the counter has started.
func askFirst(ctx context.Context, pid int) (n int, err error) {
	err = testbed.Poll(ctx, startWithin, func(context.Context) (err error) {
		n, err = ask(pid)
		return err
	})
	return n, err
}

// answers fails unless the counter's next answer is want: it has its memory of
// the moment that it was brought back to.
func answers(pid, want int) error {
	n, err := ask(pid)
	if err != nil {
		return err
	}
	if n != want {
		return fmt.Errorf("ask process %d: it answers %d, not %d", pid, n, want)
	}
	return nil
}
