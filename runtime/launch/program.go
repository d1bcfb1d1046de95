package launch

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	// base is where the program lies. Both are multiples of the largest page
	// that either architecture has.
	base      = 0x400000
	alignment = 0x10000
	// programs are the headers: code, stack.
	programs = 2
)

var (
	mu sync.Mutex
	// program is the launcher, once it was asked for.
	program *os.File
)

// File returns the launcher as a file that can be executed by its descriptor but
// not changed, not even by the containers that it is passed to. It is open as long
// as this process lives and not to be closed.
func File() (*os.File, error) {
	mu.Lock()
	defer mu.Unlock()
	if program != nil {
		return program, nil
	}
	f, err := openProgram()
	if err != nil {
		return nil, fmt.Errorf("open launcher: %w", err)
	}
	program = f
	return f, nil
}

func openProgram() (*os.File, error) {
	text, entry, err := code()
	if err != nil {
		return nil, err
	}
	image, err := wrap(text, entry)
	if err != nil {
		return nil, err
	}
	fd, err := createMemory()
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "launcher")
	if _, err := f.Write(image); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := seal(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// createMemory creates the memory file. Kernels before 6.3 do not know MFD_EXEC,
// later ones may want it: vm.memfd_noexec.
func createMemory() (int, error) {
	const name, flags = "statefork-launch", unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, flags)
	}
	if errors.Is(err, unix.EACCES) {
		return -1, fmt.Errorf("vm.memfd_noexec forbids it: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return fd, os.NewSyscallError("memfd_create", err)
}

// seal makes the file's contents final, and its mode as far as the kernel can:
// root in a container that has no user namespace owns it.
func seal(f *os.File) error {
	if err := f.Chmod(0o555); err != nil {
		return err
	}
	// Linux 6.3; without, such a root can spoil the file for later starts by
	// this process, which are those of the same container.
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_EXEC); err != nil && !errors.Is(err, unix.EINVAL) {
		return os.NewSyscallError("fcntl", err)
	}
	const all = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, all)
	return os.NewSyscallError("fcntl", err)
}

// wrap puts the headers of an executable before the code, which it enters at the
// given offset. It has one segment, whose pages are neither writable nor shared
// with anything, and wants a stack that is not executable.
func wrap(text []byte, entry uint64) ([]byte, error) {
	machine, ok := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[runtime.GOARCH]
	if !ok {
		return nil, unsupported()
	}
	var header elf.Header64
	var prog elf.Prog64
	headers := uint64(binary.Size(header) + programs*binary.Size(prog))
	// The code keeps its section's alignment, which is 16 on both.
	at := (headers + 15) &^ 15
	size := at + uint64(len(text))
	header = elf.Header64{
		Ident: [elf.EI_NIDENT]byte{
			0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT),
		},
		Type:      uint16(elf.ET_EXEC),
		Machine:   uint16(machine),
		Version:   uint32(elf.EV_CURRENT),
		Entry:     base + at + entry,
		Phoff:     uint64(binary.Size(header)),
		Ehsize:    uint16(binary.Size(header)),
		Phentsize: uint16(binary.Size(prog)),
		Phnum:     programs,
	}
	segments := [programs]elf.Prog64{
		{
			Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X),
			Vaddr: base, Paddr: base, Filesz: size, Memsz: size, Align: alignment,
		},
		{Type: uint32(elf.PT_GNU_STACK), Flags: uint32(elf.PF_R | elf.PF_W), Align: 16},
	}
	var b bytes.Buffer
	if err := binary.Write(&b, binary.LittleEndian, header); err != nil {
		return nil, err
	}
	if err := binary.Write(&b, binary.LittleEndian, segments); err != nil {
		return nil, err
	}
	b.Write(make([]byte, at-uint64(b.Len())))
	b.Write(text)
	return b.Bytes(), nil
}

func unsupported() error {
	return fmt.Errorf("this build for %s has no launcher: %w", runtime.GOARCH, errdefs.ErrNotImplemented)
}
