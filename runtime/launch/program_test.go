package launch

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// helperVariable makes the test binary something else than a test.
const helperVariable = "LAUNCH_TEST_HELPER"

func TestMain(m *testing.M) {
	// What this process was given must not be in what it starts. Helpers have
	// files from 3 on that they shall hand on.
	helper := os.Getenv(helperVariable)
	var err error
	if helper == "" {
		err = unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	switch helper {
	case "execveat":
		err = helpExecveat()
	case "noexec":
		err = helpNoexec()
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func hasInterpreter(path string) (bool, error) {
	f, err := elf.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return true, nil
		}
	}
	return false, nil
}

func TestFile(t *testing.T) {
	f := needProgram(t)
	if again, err := File(); err != nil || again != f {
		t.Errorf("second call gives %v, %v", again, err)
	}
	parsed, err := elf.NewFile(f)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range parsed.Progs {
		if p.Flags&elf.PF_W != 0 && p.Flags&elf.PF_X != 0 {
			t.Errorf("segment %v can be written and executed", p)
		}
	}
	if load := parsed.Progs[0]; parsed.Entry < load.Vaddr || parsed.Entry >= load.Vaddr+load.Filesz {
		t.Errorf("entry %#x is outside of the segment", parsed.Entry)
	}
	if _, err := f.WriteAt([]byte{0}, 0); err == nil {
		t.Error("it can be written")
	}
	if err := f.Truncate(0); err == nil {
		t.Error("it can be truncated")
	}
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("not close-on-exec: %#x, %v", flags, err)
	}
}

// TestSection compiles the launcher in every way that may be asked for, and looks
// for references to what will not be there.
func TestSection(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		missing(t, "gcc")
	}
	needProgram(t)
	always := []string{"-c", "-fno-stack-protector", "-Wall", "-Wextra", "-Werror"}
	for _, flags := range [][]string{
		{"-O0"},
		{"-O1"},
		{"-O2"},
		{"-O2", "-g", "-fPIC", "-pthread"},
		{"-O2", "-fPIE", "-D_FORTIFY_SOURCE=2", "-fstack-clash-protection", "-fsanitize=address"},
		{"-O3", "-fno-pic"},
		{"-Os", "-fno-omit-frame-pointer"},
	} {
		t.Run(fmt.Sprint(flags), func(t *testing.T) {
			object := filepath.Join(t.TempDir(), "launcher.o")
			args := append(append(flags, always...), "-o", object, "launcher.c")
			if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			checkSection(t, object)
		})
	}
}

func checkSection(t *testing.T, object string) {
	t.Helper()
	f, err := elf.Open(object)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.Symbols()
	if err != nil {
		t.Fatal(err)
	}
	var ours elf.SectionIndex
	for i, s := range f.Sections {
		if s.Name != "statefork_launch" {
			continue
		}
		ours = elf.SectionIndex(i)
		if s.Flags != elf.SHF_ALLOC|elf.SHF_EXECINSTR || s.Addralign > 16 {
			t.Errorf("section has flags %v and alignment %d", s.Flags, s.Addralign)
		}
	}
	if ours == 0 {
		t.Fatal("no section")
	}
	for _, s := range f.Sections {
		if s.Type != elf.SHT_RELA || elf.SectionIndex(s.Info) != ours {
			continue
		}
		data, err := s.Data()
		if err != nil {
			t.Fatal(err)
		}
		for r := bytes.NewReader(data); ; {
			var rela elf.Rela64
			if err := binary.Read(r, f.ByteOrder, &rela); err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			// debug/elf leaves out symbol 0.
			if sym := symbols[elf.R_SYM64(rela.Info)-1]; sym.Section != ours {
				t.Errorf("refers to %q in section %v at %#x", sym.Name, sym.Section, rela.Off)
			}
		}
	}
}

// TestNoexec has the launcher made where vm.memfd_noexec, which each pid
// namespace has, is set.
func TestNoexec(t *testing.T) {
	if os.Geteuid() != 0 {
		missing(t, "root")
	}
	needProgram(t)
	if _, err := os.Stat(noexecFile); err != nil {
		missing(t, "Linux 6.3")
	}
	for value, want := range map[string]string{
		"1": "Linux\n",
		"2": "open launcher: vm.memfd_noexec forbids it: permission denied: failed precondition\n",
	} {
		t.Run(value, func(t *testing.T) {
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = []string{helperVariable + "=noexec", "VALUE=" + value, "PATH=" + os.Getenv("PATH")}
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
			// The error of the second case ends it.
			if out, err := cmd.CombinedOutput(); string(out) != want || (err == nil) != (value == "1") {
				t.Errorf("it says %q: %v", out, err)
			}
		})
	}
}

const noexecFile = "/proc/sys/vm/memfd_noexec"

// helpNoexec makes a launcher under another vm.memfd_noexec and has it run uname.
func helpNoexec() error {
	if err := os.WriteFile(noexecFile, []byte(os.Getenv("VALUE")), 0); err != nil {
		return err
	}
	f, err := File()
	if err != nil {
		return err
	}
	n, err := NewNotify("uname")
	if err != nil {
		return err
	}
	defer n.Close()
	args, err := Args(Spec{Mode: Monitor, Program: 3, Notify: 4, Path: "uname", Args: []string{"uname"}})
	if err != nil {
		return err
	}
	cmd := &exec.Cmd{Path: args[0], Args: args, Stdout: os.Stdout, ExtraFiles: []*os.File{f, n.File()}}
	if err := cmd.Start(); err != nil {
		return err
	}
	if _, err := n.Wait(bounded()); err != nil {
		return err
	}
	if err := n.Release(bounded()); err != nil {
		return err
	}
	return cmd.Wait()
}

// helpExecveat executes descriptor 3 where no /proc is.
func helpExecveat() error {
	runtime.LockOSThread()
	root := os.Getenv("ROOT")
	if err := unix.Chroot(root); err != nil {
		return err
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	argv, err := syscall.SlicePtrFromStrings(os.Args[1:])
	if err != nil {
		return err
	}
	envv, err := syscall.SlicePtrFromStrings([]string{"PATH=relative::/nowhere:/:/never"})
	if err != nil {
		return err
	}
	return execveat(3, argv, envv)
}
