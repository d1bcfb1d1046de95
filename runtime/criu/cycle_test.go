package criu

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// TestCycles moves one tree through many dumps and restores.
func TestCycles(t *testing.T) {
	b := needCRIU(t)
	if err := cycles(t, b, startTree(t, "plain", 8), 20); err != nil {
		t.Error(err)
	}
}

// cycles dumps and restores p n times; its memory, the count of its answers and
// its child's state must go on.
func cycles(t *testing.T, b *Binary, p *tree, n int) error {
	first, err := p.query("sum")
	if err != nil {
		return err
	}
	var sum string
	var asked, state int
	if _, err := fmt.Sscan(first, &sum, &asked, &state); err != nil {
		return err
	}
	for range n {
		images := t.TempDir()
		if err := p.dump(b, DumpOptions{Images: images}); err != nil {
			return err
		}
		p.wait()
		if _, err := p.restore(b, RestoreOptions{Images: images, Work: t.TempDir()}); err != nil {
			return err
		}
		asked++
		state = int(int8(state + 1)) // a char of the program's
		want := fmt.Sprintf("%s %d %d", sum, asked, state)
		got, err := p.query("sum")
		if err != nil {
			return err
		}
		if got != want {
			return fmt.Errorf("tree says %q, want %q", got, want)
		}
	}
	return nil
}

// TestRestoreTwice brings one dump to life again and again: images are never
// changed, and each life begins at the same point.
func TestRestoreTwice(t *testing.T) {
	b := needCRIU(t)
	p := startTree(t, "plain", 1)
	images := t.TempDir()
	if err := p.dump(b, DumpOptions{Images: images, LeaveRunning: true}); err != nil {
		t.Fatal(err)
	}
	first := p.ask("sum") // it ran on
	for _, closed := range []bool{false, true, false} {
		p.kill()
		if _, err := p.restore(b, RestoreOptions{Images: images, Work: t.TempDir(), TCPClose: closed}); err != nil {
			t.Fatal(err)
		}
		if got := p.ask("sum"); got != first {
			t.Fatalf("tree says %q, at first %q", got, first)
		}
	}
}

func TestStats(t *testing.T) {
	b := needCRIU(t)
	const mib = 4
	p := startTree(t, "plain", mib)
	w, err := b.Spawn(t.Context(), SpawnOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer closeWorker(t, w)
	images, work := t.TempDir(), t.TempDir()
	dumped, err := w.Dump(t.Context(), DumpOptions{Pid: p.pid, Images: images, Work: work})
	if err != nil {
		t.Fatal(err)
	}
	p.wait()
	least := uint64(mib << 20 / os.Getpagesize())
	if dumped.PagesWritten < least || dumped.PagesScanned < dumped.PagesWritten || dumped.FrozenTime <= 0 {
		t.Errorf("implausible dump: %+v", dumped)
	}
	restored, err := p.restore(b, RestoreOptions{Images: images, Work: work})
	if err != nil {
		t.Fatal(err)
	}
	if s := restored.Stats; s.PagesRestored < least || s.RestoreTime <= 0 || s.ForkingTime > s.RestoreTime {
		t.Errorf("implausible restore: %+v", s)
	}
}

// TestConcurrent runs the cycles of several trees at once.
func TestConcurrent(t *testing.T) {
	b := needCRIU(t)
	trees := make([]*tree, 8)
	for i := range trees {
		trees[i] = startTree(t, "plain", i)
	}
	var wg sync.WaitGroup
	for _, p := range trees {
		wg.Go(func() {
			if err := cycles(t, b, p, 3); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// TestTerminal gets back the master of a terminal that was open outside.
func TestTerminal(t *testing.T) {
	b := needCRIU(t)
	master, number := openTerminal(t)
	p := startTree(t, "terminal", 1, fmt.Sprintf("TERMINAL=/dev/pts/%d", number))
	images := t.TempDir()
	if err := p.dump(b, DumpOptions{Images: images}); err != nil {
		t.Fatal(err)
	}
	p.wait()
	master.Close() // or its number would be taken
	r, err := p.restore(b, RestoreOptions{Images: images})
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(r.Masters)
	if len(r.Masters) != 1 {
		t.Fatalf("got %d masters, want 1", len(r.Masters))
	}
	fd := int(r.Masters[0].Fd())
	if got, err := unix.IoctlGetInt(fd, unix.TIOCGPTN); err != nil || got != number {
		t.Errorf("master is of terminal %d (%v), want %d", got, err, number)
	}
	if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("master is not close-on-exec: %#x, %v", flags, err)
	}
	if ws, err := unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ); err != nil || ws.Col != 123 {
		t.Errorf("window is %+v (%v), want 123 columns", ws, err)
	}
	if got := p.ask("say"); got != "said" {
		t.Errorf("tree says %q", got)
	}
	buf := make([]byte, 64)
	n, err := r.Masters[0].Read(buf)
	if err != nil || strings.TrimSpace(string(buf[:n])) != "hello" {
		t.Errorf("terminal shows %q (%v), want hello", buf[:n], err)
	}
}

// openTerminal returns the master of a new terminal of the host, and its number.
func openTerminal(t *testing.T) (*os.File, int) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		missing(t, "a terminal: "+err.Error())
	}
	t.Cleanup(func() { master.Close() })
	fd := int(master.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 45, Col: 123}); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	return master, number
}

// TestTimerfd keeps a periodic timer going that has expired before the dump and
// was not read. Without RearmTimerfds it never fires again.
func TestTimerfd(t *testing.T) {
	b := needCRIU(t)
	p := startTree(t, "timer", 0)
	images := t.TempDir()
	if err := p.dump(b, DumpOptions{Images: images}); err != nil {
		t.Fatal(err)
	}
	p.wait()
	if err := RearmTimerfds(images); err != nil {
		t.Fatal(err)
	}
	if _, err := p.restore(b, RestoreOptions{Images: images}); err != nil {
		t.Fatal(err)
	}
	if got := p.ask("fire"); got == "0" {
		t.Error("timer does not fire")
	}
}

// TestRearmNothing leaves an image alone that needs no repair.
func TestRearmNothing(t *testing.T) {
	b := needCRIU(t)
	p := startTree(t, "plain", 0)
	images := t.TempDir()
	if err := p.dump(b, DumpOptions{Images: images, LeaveRunning: true}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(images, filesImage)
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := RearmTimerfds(images); err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(before, after) {
		t.Error("image was replaced")
	}
}

// TestCutOffImages finds images that are missing, or of which the end is.
func TestCutOffImages(t *testing.T) {
	b := needCRIU(t)
	p := startTree(t, "plain", 1)
	images := t.TempDir()
	if err := p.dump(b, DumpOptions{Images: images, LeaveRunning: true}); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if err := CheckImages(images); err != nil {
		t.Fatal(err)
	}
	t.Logf("whole images: %v", time.Since(begin))
	pages := filepath.Join(images, "pages-1.img")
	st, err := os.Stat(pages)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(pages, st.Size()-1); err != nil {
		t.Fatal(err)
	}
	if err := CheckImages(images); !errdefs.IsDataLoss(err) {
		t.Errorf("got %v for a cut pages image, want data loss", err)
	}
	for _, kind := range []string{"core", "mm", "fs", "ids", "pagemap"} {
		names, err := filepath.Glob(filepath.Join(images, kind+"-*.img"))
		if err != nil || len(names) == 0 {
			t.Fatalf("images %q: %v, %v", kind, names, err)
		}
		aside := names[0] + ".aside"
		if err := os.Rename(names[0], aside); err != nil {
			t.Fatal(err)
		}
		if err := CheckImages(images); !errdefs.IsDataLoss(err) || !strings.Contains(err.Error(), filepath.Base(names[0])) {
			t.Errorf("without %s: got %v, want data loss that names it", names[0], err)
		}
		if err := os.Rename(aside, names[0]); err != nil {
			t.Fatal(err)
		}
	}
	if err := CheckImages(t.TempDir()); !errdefs.IsDataLoss(err) {
		t.Errorf("got %v for an empty directory, want data loss", err)
	}
}

// BenchmarkDump dumps a small tree that runs on, by workers spawned ahead.
func BenchmarkDump(b *testing.B) {
	bin := needCRIU(b)
	p := startTree(b, "plain", 1)
	images := b.TempDir()
	for b.Loop() {
		b.StopTimer()
		w, err := bin.Spawn(b.Context(), SpawnOptions{})
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		if _, err := w.Dump(b.Context(), DumpOptions{Pid: p.pid, Images: images, LeaveRunning: true}); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		closeWorker(b, w)
		b.StartTimer()
	}
}
