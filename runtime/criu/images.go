package criu

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/checkpoint-restore/go-criu/v8/crit"
	criu_core "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
)

// pagePresent is CRIU's mark of pages that lie in the pages image.
const pagePresent = 1 << 2

// CheckImages reports images of processes that are missing, and images of memory
// that are cut off, as those are that a crash of the host has caught before they
// reached the disk. CRIU does not fail on the latter: it reads on without an
// end. A restore that cannot be called off should check first; it takes about a
// millisecond. The error is of class errdefs.ErrDataLoss.
func CheckImages(images string) error {
	if _, err := os.Stat(filepath.Join(images, "inventory.img")); err != nil {
		return fmt.Errorf("check process images: %w: %w", err, errdefs.ErrDataLoss)
	}
	if err := checkProcesses(images); err != nil {
		return fmt.Errorf("check process images: %w: %w", err, errdefs.ErrDataLoss)
	}
	maps, err := filepath.Glob(filepath.Join(images, "pagemap-*.img"))
	if err != nil {
		return fmt.Errorf("check process images: %w", err)
	}
	for _, path := range maps {
		if err := checkPages(path); err != nil {
			return fmt.Errorf("check process images: %w: %w", err, errdefs.ErrDataLoss)
		}
	}
	return nil
}

// checkProcesses looks whether every process of the tree has its images. One that
// has ended and waits for its parent has no memory.
func checkProcesses(images string) error {
	_, tree, err := readTree(filepath.Join(images, treeImage))
	if err != nil {
		return err
	}
	for _, p := range tree {
		alive, err := isAlive(images, p)
		if err != nil {
			return err
		}
		if !alive {
			continue // and what is said of its threads means nothing
		}
		var need []string
		for _, thread := range p.GetThreads() {
			need = append(need, fmt.Sprintf("core-%d.img", thread))
		}
		for _, kind := range []string{"mm", "pagemap", "fs", "ids"} {
			need = append(need, fmt.Sprintf("%s-%d.img", kind, p.GetPid()))
		}
		for _, name := range need {
			if _, err := os.Stat(filepath.Join(images, name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// treeImage holds the processes and how they descend from each other, the root
// first.
const treeImage = "pstree.img"

// readTree reads that image; the entries are those in it.
func readTree(path string) (*crit.CriuImage, []*pstree.PstreeEntry, error) {
	img, err := decode(path, &pstree.PstreeEntry{})
	if err != nil {
		return nil, nil, err
	}
	var tree []*pstree.PstreeEntry
	for _, e := range img.Entries {
		p, ok := e.Message.(*pstree.PstreeEntry)
		if !ok {
			return nil, nil, fmt.Errorf("image %q has a %T", path, e.Message)
		}
		tree = append(tree, p)
	}
	if len(tree) == 0 {
		return nil, nil, fmt.Errorf("image %q is empty", path)
	}
	return img, tree, nil
}

// taskAlive is CRIU's state of a process that has not ended.
const taskAlive = 1

func isAlive(images string, p *pstree.PstreeEntry) (bool, error) {
	path := filepath.Join(images, fmt.Sprintf("core-%d.img", p.GetPid()))
	img, err := decode(path, &criu_core.CoreEntry{})
	if err != nil {
		return false, err
	}
	if len(img.Entries) == 0 {
		return false, fmt.Errorf("image %q is empty", path)
	}
	core, ok := img.Entries[0].Message.(*criu_core.CoreEntry)
	if !ok {
		return false, fmt.Errorf("image %q has a %T", path, img.Entries[0].Message)
	}
	return core.GetTc().GetTaskState() == taskAlive, nil
}

// checkPages compares a page map with the size of its pages image.
func checkPages(path string) error {
	img, err := decode(path, &pagemap.PagemapEntry{})
	if err != nil {
		return err
	}
	if len(img.Entries) == 0 {
		return fmt.Errorf("image %q is empty", path)
	}
	head, ok := img.Entries[0].Message.(*pagemap.PagemapHead)
	if !ok {
		return fmt.Errorf("image %q has no head", path)
	}
	var want int64
	for _, e := range img.Entries[1:] {
		if m, ok := e.Message.(*pagemap.PagemapEntry); ok && present(m) {
			want += int64(pageCount(m)) * int64(os.Getpagesize())
		}
	}
	if want == 0 {
		return nil
	}
	pages := filepath.Join(filepath.Dir(path), fmt.Sprintf("pages-%d.img", head.GetPagesId()))
	st, err := os.Stat(pages)
	if err != nil {
		return err
	}
	if st.Size() < want {
		return fmt.Errorf("image %q has %d of %d bytes", pages, st.Size(), want)
	}
	return nil
}

// pageCount is how many pages the entry stands for: CRIU 4.2 has a wider field.
func pageCount(m *pagemap.PagemapEntry) uint64 {
	if m.NrPages != nil {
		return m.GetNrPages()
	}
	return uint64(m.GetCompatNrPages())
}

// present reports whether the entry's pages are in the pages image. Entries
// without flags are of old images, where only a parent's pages are not.
func present(m *pagemap.PagemapEntry) bool {
	if m.Flags == nil {
		return !m.GetInParent()
	}
	return m.GetFlags()&pagePresent != 0
}

// decode reads an image whose entries are of one type.
func decode(path string, entry proto.Message) (*crit.CriuImage, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	img, err := crit.New(f, nil, "", false, false).Decode(entry)
	if err != nil {
		return nil, fmt.Errorf("decode image %q: %w", path, err)
	}
	return img, nil
}

// encode replaces an image. The old one stays until the new one is whole.
func encode(path string, img *crit.CriuImage) (retErr error) {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if retErr != nil {
			os.Remove(f.Name())
		}
	}()
	defer f.Close()
	if err := crit.New(nil, f, "", false, false).Encode(img); err != nil {
		return fmt.Errorf("encode image %q: %w", path, err)
	}
	return os.Rename(f.Name(), path)
}
