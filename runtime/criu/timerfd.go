package criu

import (
	"fmt"
	"path/filepath"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/timerfd"
	"google.golang.org/protobuf/proto"
)

// filesImage holds the open files of all tasks.
const filesImage = "files.img"

// RearmTimerfds repairs the periodic timers in a directory of images, right
// after the dump. The kernel shows a periodic timerfd that has expired and was
// not read since with no time left, as it arms it again only at the read. CRIU
// takes it for a disarmed one, which never fires again. Such a timer gets its
// whole interval.
func RearmTimerfds(images string) error {
	path := filepath.Join(images, filesImage)
	img, err := decode(path, &fdinfo.FileEntry{})
	if err != nil {
		return fmt.Errorf("rearm timers: %w", err)
	}
	changed := false
	for _, e := range img.Entries {
		if f, ok := e.Message.(*fdinfo.FileEntry); ok && rearm(f.GetTfd()) {
			changed = true
		}
	}
	if !changed {
		return nil
	}
	if err := encode(path, img); err != nil {
		return fmt.Errorf("rearm timers: %w", err)
	}
	return nil
}

// rearm repairs one timer and reports whether it had to.
func rearm(t *timerfd.TimerfdEntry) bool {
	if t == nil || t.GetVsec() != 0 || t.GetVnsec() != 0 || t.GetIsec() == 0 && t.GetInsec() == 0 {
		return false
	}
	t.Vsec, t.Vnsec = proto.Uint64(t.GetIsec()), proto.Uint64(t.GetInsec())
	return true
}
