package container

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/layer"
	"github.com/statefork/statefork/runtime/criu"
)

// ImageVersion is the version of the process images' description that this
// package writes, and the only one that it reads.
const ImageVersion = 1

// descriptionFile is written last, by rename: images without it are not whole.
const descriptionFile = layer.DescriptionFile

// Description tells what process images hold beside CRIU's own files, and what
// of the container they only refer to. It lies with them as statefork.json.
type Description struct {
	Version int `json:"version"`
	// Container is the id of the container that was dumped.
	Container string `json:"container"`
	// Stdio names, by file descriptor of init, the pipes that a restore has
	// to replace: "pipe:[inode]". It is empty for a terminal.
	Stdio map[int]string `json:"stdio,omitempty"`
	// Terminal says that init has a terminal of the container's own devpts.
	Terminal bool `json:"terminal,omitempty"`
	// Mounts are the mounts that CRIU leaves to us.
	Mounts []ExternalMount `json:"mounts"`
	// Entered lists the namespaces that are not in the images because CRIU
	// ran inside them: "net", "uts", "ipc".
	Entered []string `json:"entered"`
	// Hostname and Domainname stand in for the UTS namespace.
	Hostname   string `json:"hostname"`
	Domainname string `json:"domainname,omitempty"`
	// Peers lists established connections to outside of the container, as
	// "local - remote". They do not survive a restore to an earlier node.
	Peers []string `json:"peers,omitempty"`
	// CRIU is the version that wrote the images, as criu reports it: 40201.
	CRIU int `json:"criu"`
	// Kernel is the release of the kernel that the tree ran on.
	Kernel string `json:"kernel"`
}

// Mount kinds of an ExternalMount.
const (
	// mountTmpfs is a tmpfs (or a bind of a part of one). Its content is kept
	// in an archive beside the images.
	mountTmpfs = "tmpfs"
	// mountCgroup is a view of the container's own cgroup.
	mountCgroup = "cgroup"
	// mountBind is anything that came from outside: bind mounts, volumes,
	// device nodes. Its content is neither kept nor rolled back.
	mountBind = "bind"
)

// ExternalMount is one mount of the container that CRIU does not rebuild.
type ExternalMount struct {
	// Key is the name under which CRIU asks for the mount at a restore.
	Key string `json:"key"`
	// Mountpoint is the path in the container.
	Mountpoint string `json:"mountpoint"`
	Kind       string `json:"kind"`
	// FSType, Source and Options are the file system's type, what it calls its
	// source, and its own options.
	FSType  string `json:"fstype"`
	Source  string `json:"source,omitempty"`
	Options string `json:"options,omitempty"`
	// Flags are those of this mount, as mountinfo shows them: "ro,nosuid".
	Flags string `json:"flags,omitempty"`
	// Dev identifies the file system instance within one Description.
	Dev string `json:"dev"`
	// Root is the mounted part of the file system.
	Root string `json:"root"`
	// Dir says that the mount covers a directory.
	Dir bool `json:"dir"`
	// Top describes the root directory of a tmpfs.
	Top *rootMode `json:"top,omitempty"`
}

// archiveName returns the name of the file that holds the content of the
// tmpfs instance dev ("0:45").
func archiveName(dev string) string { return "tmpfs-" + dev + ".tar" }

// readDescription reads the description of the images in dir. It fails with
// ErrNotFound if there is none, which means that the images are not whole.
func readDescription(dir string) (*Description, error) {
	b, err := os.ReadFile(filepath.Join(dir, descriptionFile))
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("process images %q have no %s: not a finished checkpoint of statefork: %w", dir, descriptionFile, errdefs.ErrNotFound)
		}
		return nil, fmt.Errorf("read description of process images: %w", err)
	}
	d := &Description{}
	if err := json.Unmarshal(b, d); err != nil {
		return nil, fmt.Errorf("parse %q: %w", filepath.Join(dir, descriptionFile), err)
	}
	if d.Version != ImageVersion {
		return nil, fmt.Errorf("process images %q have version %d, this shim reads %d: %w", dir, d.Version, ImageVersion, errdefs.ErrFailedPrecondition)
	}
	return d, nil
}

// readImages reads the description of images that are going to be restored, and
// looks whether they are as long as they should be: CRIU does not.
func readImages(dir string) (*Description, error) {
	d, err := readDescription(dir)
	if err != nil {
		return nil, err
	}
	if err := criu.CheckImages(dir); err != nil {
		return nil, err
	}
	return d, nil
}

// write writes the description into dir; commit makes the images whole.
func (d *Description) write(dir string) (commit func() error, _ error) {
	b, err := json.MarshalIndent(d, "", "\t")
	if err != nil {
		return nil, err
	}
	tmp := filepath.Join(dir, "."+descriptionFile)
	if err := os.WriteFile(tmp, append(b, '\n'), 0o600); err != nil {
		return nil, fmt.Errorf("write description of process images: %w", err)
	}
	return func() error {
		if err := os.Rename(tmp, filepath.Join(dir, descriptionFile)); err != nil {
			return fmt.Errorf("write description of process images: %w", err)
		}
		return nil
	}, nil
}

// entered says whether the namespace ns is not in the images.
func (d *Description) entered(ns string) bool {
	for _, e := range d.Entered {
		if e == ns {
			return true
		}
	}
	return false
}

// externalNames lists, by path in the container, the mounts whose content is
// outside of the checkpoint and could have changed.
func (d *Description) externalNames() []string {
	var names []string
	for _, m := range d.Mounts {
		if m.Kind == mountBind && !isDeviceOrNameFile(m) {
			names = append(names, m.Mountpoint)
		}
	}
	return names
}

// isDeviceOrNameFile says whether m is one of the mounts that every container
// has and that hold no state of its user: device nodes and the files by which
// an engine tells a container its names.
func isDeviceOrNameFile(m ExternalMount) bool {
	switch m.Mountpoint {
	case "/etc/hosts", "/etc/hostname", "/etc/resolv.conf":
		return true
	}
	return m.FSType == "devtmpfs"
}

// imagesSize returns the bytes that the files in dir occupy.
func imagesSize(dir string) (uint64, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, fmt.Errorf("size process images: %w", err)
	}
	var n uint64
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return 0, fmt.Errorf("size process images: %w", err)
		}
		n += uint64(info.Size())
	}
	return n, nil
}
