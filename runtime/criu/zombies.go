package criu

import (
	"path/filepath"

	"google.golang.org/protobuf/proto"
)

// DetachZombies makes zombies of the root their own sessions in the images, where
// they were in a session whose leader has ended too. CRIU would have the leader,
// itself a zombie to be, bring them to life and wait for them, and that can hang
// for ever. Nothing but ps can tell the difference: of a zombie its parent learns
// the pid and how it has ended.
func DetachZombies(images string) error {
	path := filepath.Join(images, treeImage)
	img, tree, err := readTree(path)
	if err != nil {
		return err
	}
	root, changed := tree[0], false
	for _, p := range tree[1:] {
		if p.GetPpid() != root.GetPid() || p.GetSid() == p.GetPid() || p.GetSid() == root.GetSid() {
			continue
		}
		alive, err := isAlive(images, p)
		if err != nil {
			return err
		}
		if !alive {
			p.Sid, p.Pgid = proto.Uint32(p.GetPid()), proto.Uint32(p.GetPid())
			changed = true
		}
	}
	if !changed {
		return nil
	}
	return encode(path, img)
}
