package criu

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/checkpoint-restore/go-criu/v8/crit"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
)

// pagePresent is CRIU's mark of pages that lie in the pages image.
const pagePresent = 1 << 2

// CheckImages reports images of memory that are cut off, as those are that a
// crash of the host has caught before they reached the disk. CRIU does not fail
// on them: it reads on without an end. A restore that cannot be called off
// should check first; it takes less than a millisecond. The error is of class
// errdefs.ErrDataLoss.
func CheckImages(images string) error {
	if _, err := os.Stat(filepath.Join(images, "inventory.img")); err != nil {
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
