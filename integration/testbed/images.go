package testbed

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Busybox is the name of the small image. Its host part keeps tools from asking
// a registry.
const Busybox = "localhost/busybox:latest"

// layer is an uncompressed layer of an image.
type layer struct {
	digest digest.Digest
	size   int64
	open   func() (io.ReadCloser, error)
}

func layerOf(b []byte) layer {
	return layer{digest.FromBytes(b), int64(len(b)), func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(b)), nil
	}}
}

// writeImage writes an OCI archive of one image.
func writeImage(w io.Writer, name string, cfg ocispec.ImageConfig, layers ...layer) error {
	image := ocispec.Image{
		Platform: ocispec.Platform{OS: "linux", Architecture: runtime.GOARCH},
		Config:   cfg,
		RootFS:   ocispec.RootFS{Type: "layers"},
	}
	manifest := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
	for _, l := range layers {
		image.RootFS.DiffIDs = append(image.RootFS.DiffIDs, l.digest)
		manifest.Layers = append(manifest.Layers, ocispec.Descriptor{
			MediaType: ocispec.MediaTypeImageLayer, Digest: l.digest, Size: l.size,
		})
	}
	a := &imageArchive{w: tar.NewWriter(w)}
	manifest.Config = a.json(ocispec.MediaTypeImageConfig, image)
	desc := a.json(ocispec.MediaTypeImageManifest, manifest)
	desc.Platform = &image.Platform
	desc.Annotations = map[string]string{"io.containerd.image.name": name}
	a.file("index.json", mustJSON(ocispec.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex,
		Manifests: []ocispec.Descriptor{desc},
	}))
	a.file(ocispec.ImageLayoutFile, mustJSON(ocispec.ImageLayout{Version: ocispec.ImageLayoutVersion}))
	for _, l := range layers {
		a.blob(l)
	}
	if a.err == nil {
		a.err = a.w.Close()
	}
	if a.err != nil {
		return fmt.Errorf("write image %q: %w", name, a.err)
	}
	return nil
}

// imageArchive keeps the first error, after which it does nothing more.
type imageArchive struct {
	w   *tar.Writer
	err error
}

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain data
	}
	return b
}

func (a *imageArchive) json(mediaType string, v any) ocispec.Descriptor {
	b := mustJSON(v)
	a.blob(layerOf(b))
	return ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(b), Size: int64(len(b))}
}

func (a *imageArchive) file(name string, b []byte) { a.copy(name, layerOf(b)) }

func (a *imageArchive) blob(l layer) {
	a.copy("blobs/"+l.digest.Algorithm().String()+"/"+l.digest.Encoded(), l)
}

func (a *imageArchive) copy(name string, l layer) {
	if a.err != nil {
		return
	}
	if a.err = a.w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: l.size}); a.err != nil {
		return
	}
	r, err := l.open()
	if err != nil {
		a.err = err
		return
	}
	defer r.Close()
	_, a.err = io.Copy(a.w, r)
}

// busyboxImage makes an archive of the machine's static busybox: a layer of
// directories and files, and above it one of programs.
func busyboxImage() ([]byte, error) {
	path, err := exec.LookPath("busybox")
	if err != nil {
		return nil, fmt.Errorf("busybox: %w", ErrMissing)
	}
	program, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read busybox: %w", err)
	}
	list, err := exec.Command(path, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("list applets of busybox: %w", err)
	}
	base, err := filesLayer(func(w *tarFiles) {
		for _, dir := range []string{"bin", "dev", "etc", "home", "proc", "root", "run", "sys", "usr", "var"} {
			w.dir(dir, 0o755)
		}
		w.dir("tmp", 0o1777)
		w.file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home:/bin/sh\n", 0o644)
		w.file("etc/group", "root:x:0:\nuser:x:1000:\n", 0o644)
		w.file("etc/base", "of the image\n", 0o644)
	})
	if err != nil {
		return nil, err
	}
	programs, err := filesLayer(func(w *tarFiles) {
		w.file("bin/busybox", string(program), 0o755)
		for _, applet := range strings.Fields(string(list)) {
			if applet != "busybox" {
				w.link("bin/"+applet, "busybox")
			}
		}
	})
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	cfg := ocispec.ImageConfig{Env: []string{"PATH=/bin"}, Cmd: []string{"sh"}}
	err = writeImage(&b, Busybox, cfg, layerOf(base), layerOf(programs))
	return b.Bytes(), err
}

// tarFiles writes a layer; it keeps the first error.
type tarFiles struct {
	w   *tar.Writer
	err error
}

func filesLayer(fill func(*tarFiles)) ([]byte, error) {
	var b bytes.Buffer
	w := &tarFiles{w: tar.NewWriter(&b)}
	fill(w)
	if w.err == nil {
		w.err = w.w.Close()
	}
	if w.err != nil {
		return nil, fmt.Errorf("write layer: %w", w.err)
	}
	return b.Bytes(), nil
}

func (w *tarFiles) add(h tar.Header, content string) {
	if w.err != nil {
		return
	}
	h.ModTime = time.Unix(1, 0)
	h.Size = int64(len(content))
	if w.err = w.w.WriteHeader(&h); w.err == nil {
		_, w.err = io.WriteString(w.w, content)
	}
}

func (w *tarFiles) dir(name string, mode int64) {
	w.add(tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode}, "")
}

func (w *tarFiles) file(name, content string, mode int64) {
	w.add(tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode}, content)
}

func (w *tarFiles) link(name, target string) {
	w.add(tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, "")
}

// ImportBusybox puts the small image into the namespace, unpacked for both
// snapshotters.
func (n *Namespace) ImportBusybox(ctx context.Context) error {
	archive, err := busyboxImage()
	if err != nil {
		return err
	}
	return n.importImage(ctx, bytes.NewReader(archive), Snapshotter, Stock)
}

func (n *Namespace) importImage(ctx context.Context, r io.Reader, snapshotters ...string) error {
	ctx = n.scope(ctx)
	imgs, err := n.client.Import(ctx, r)
	if err != nil {
		return fmt.Errorf("import image: %w", err)
	}
	for _, img := range imgs {
		for _, s := range snapshotters {
			if err := containerd.NewImage(n.client, img).Unpack(ctx, s); err != nil {
				return fmt.Errorf("unpack image %q for %q: %w", img.Name, s, err)
			}
		}
	}
	return nil
}
