package waypoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"syscall"

	"github.com/containerd/errdefs"
)

// Labels by which nerdctl finds what belongs to a container. They are also
// copied into the spec's annotations, from where nerdctl's hooks read them.
const (
	nerdctlPrefix      = "nerdctl/"
	nerdctlNetworks    = nerdctlPrefix + "networks"
	nerdctlName        = nerdctlPrefix + "name"
	nerdctlHostname    = nerdctlPrefix + "hostname"
	nerdctlStateDir    = nerdctlPrefix + "state-dir"
	nerdctlLogURI      = nerdctlPrefix + "log-uri"
	nerdctlLogConfig   = nerdctlPrefix + "log-config"
	nerdctlPorts       = nerdctlPrefix + "ports"
	nerdctlPIDFile     = nerdctlPrefix + "pid-file"
	nerdctlIP          = nerdctlPrefix + "ip"
	nerdctlIP6         = nerdctlPrefix + "ip6"
	nerdctlMAC         = nerdctlPrefix + "mac-address"
	nerdctlAnonymous   = nerdctlPrefix + "anonymous-volumes"
	nerdctlHealthcheck = nerdctlPrefix + "healthcheck"
	nerdctlHostConfig  = nerdctlPrefix + "host-config"
	nerdctlIPC         = nerdctlPrefix + "ipc"
)

// nerdctlNameRE is what nerdctl takes as a name.
var nerdctlNameRE = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]+$`)

// store is nerdctl's data directory for one containerd address and one
// containerd namespace:
//
//	<root>/containers/<ns>/<id>/   state of a container
//	<root>/etchosts/<ns>/<id>/     its /etc/hosts and what that is made of
//	<root>/names/<ns>/<name>       holds the id of the container of that name
//
// nerdctl locks the directories of hosts and of names by flock(2).
type store struct{ root, ns string }

// storeOf finds the store from the state directory that a label names.
func storeOf(stateDir, ns, id string) (store, error) {
	s := store{root: filepath.Dir(filepath.Dir(filepath.Dir(stateDir))), ns: ns}
	if !filepath.IsAbs(stateDir) || s.state(id) != filepath.Clean(stateDir) {
		return store{}, fmt.Errorf("state directory %q is not of nerdctl's layout: %w", stateDir, errdefs.ErrFailedPrecondition)
	}
	return s, nil
}

func (s store) state(id string) string  { return filepath.Join(s.root, "containers", s.ns, id) }
func (s store) hosts(id string) string  { return filepath.Join(s.root, "etchosts", s.ns, id) }
func (s store) name(name string) string { return filepath.Join(s.root, "names", s.ns, name) }

// portMapping is a published port as nerdctl keeps it.
type portMapping struct {
	HostPort      int32
	ContainerPort int32
	Protocol      string
	HostIP        string
}

// ports are the published ports of a container.
func (s store) ports(id string) ([]portMapping, error) {
	b, err := os.ReadFile(filepath.Join(s.state(id), "network-config.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read network of container %q: %w", id, err)
	}
	var cfg struct {
		PortMappings []portMapping `json:"portMappings"`
	}
	if err := json.Unmarshal(b, &cfg); err != nil {
		return nil, fmt.Errorf("read network of container %q: %w", id, err)
	}
	return cfg.PortMappings, nil
}

// owner returns the id that has a name, or nothing.
func (s store) owner(name string) (string, error) {
	b, err := os.ReadFile(s.name(name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return string(b), err
}

// add makes everything that nerdctl needs for a fork, and takes its name. On
// failure nothing is left.
func (s store) add(src string, to identity, hostname string) (retErr error) {
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, s.remove(to))
		}
	}()
	if err := s.acquire(to); err != nil {
		return err
	}
	if err := s.addState(src, to, hostname); err != nil {
		return fmt.Errorf("copy nerdctl state to container %q: %w", to.ID, err)
	}
	if err := s.addHosts(src, to, hostname); err != nil {
		return fmt.Errorf("copy nerdctl hosts to container %q: %w", to.ID, err)
	}
	return nil
}

// addState copies what describes the container. What its run has left (logs,
// locks, times) is not copied, and no port is published twice.
func (s store) addState(src string, to identity, hostname string) error {
	dir := s.state(to.ID)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	for name, edit := range map[string]func([]byte) ([]byte, error){
		"resolv.conf":         nil,
		"log-config.json":     withoutLogPath,
		"network-config.json": func([]byte) ([]byte, error) { return []byte("{}"), nil },
		"hostname": func(b []byte) ([]byte, error) {
			if hostname == "" {
				return b, nil
			}
			return []byte(hostname + "\n"), nil
		},
	} {
		if err := copyFile(filepath.Join(s.state(src), name), filepath.Join(dir, name), edit); err != nil {
			return err
		}
	}
	// "nerdctl logs" wants the file before the first line is in it.
	return os.WriteFile(filepath.Join(dir, to.ID+"-json.log"), nil, 0o600)
}

// addHosts copies /etc/hosts and its description. nerdctl's start hook fills in
// the addresses that the fork gets.
func (s store) addHosts(src string, to identity, hostname string) error {
	dir := s.hosts(to.ID)
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return err
	}
	unlock, err := lock(filepath.Dir(dir))
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := copyFile(filepath.Join(s.hosts(src), "hosts"), filepath.Join(dir, "hosts"), nil); err != nil {
		return err
	}
	return copyFile(filepath.Join(s.hosts(src), "meta.json"), filepath.Join(dir, "meta.json"), func(b []byte) ([]byte, error) {
		return editJSON(b, func(m map[string]any) {
			m["ID"], m["Name"], m["Networks"] = to.ID, to.Name, nil
			if hostname != "" {
				m["Hostname"] = hostname
			}
		})
	})
}

// acquire takes the name for the fork.
func (s store) acquire(to identity) error {
	dir := filepath.Dir(s.name(to.Name))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	unlock, err := lock(dir)
	if err != nil {
		return err
	}
	defer unlock()
	owner, err := s.owner(to.Name)
	if err != nil {
		return fmt.Errorf("read name %q: %w", to.Name, err)
	}
	if owner != "" && owner != to.ID {
		return fmt.Errorf("name %q is in use by container %q: %w", to.Name, owner, errdefs.ErrAlreadyExists)
	}
	if err := os.WriteFile(s.name(to.Name), []byte(to.ID), 0o600); err != nil {
		return fmt.Errorf("take name %q: %w", to.Name, err)
	}
	return nil
}

// remove takes back what add has made. The name may be another's by now.
func (s store) remove(to identity) error {
	return errors.Join(s.release(to), s.removeHosts(to), os.RemoveAll(s.state(to.ID)))
}

func (s store) release(to identity) error {
	unlock, err := lock(filepath.Dir(s.name(to.Name)))
	if err != nil {
		return err
	}
	defer unlock()
	if owner, err := s.owner(to.Name); err != nil || owner != to.ID {
		return err
	}
	return os.Remove(s.name(to.Name))
}

func (s store) removeHosts(to identity) error {
	unlock, err := lock(filepath.Dir(s.hosts(to.ID)))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	return os.RemoveAll(s.hosts(to.ID))
}

// lock waits for the lock that nerdctl takes on a directory.
func lock(dir string) (unlock func(), _ error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %q: %w", dir, err)
	}
	return func() { f.Close() }, nil
}

// copyFile copies a small file with its mode; a missing one is skipped.
func copyFile(from, to string, edit func([]byte) ([]byte, error)) error {
	info, err := os.Stat(from)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if edit != nil {
		if b, err = edit(b); err != nil {
			return fmt.Errorf("edit %q: %w", from, err)
		}
	}
	if err := os.WriteFile(to, b, info.Mode().Perm()); err != nil {
		return err
	}
	// The umask may have taken what a reader inside the container needs.
	return os.Chmod(to, info.Mode().Perm())
}

// withoutLogPath drops the option that names one log file for one container.
func withoutLogPath(b []byte) ([]byte, error) {
	return editJSON(b, func(m map[string]any) {
		if opts, ok := m["opts"].(map[string]any); ok {
			delete(opts, "log-path")
		}
	})
}

// editJSON changes fields of an object and keeps all others.
func editJSON(b []byte, edit func(map[string]any)) ([]byte, error) {
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, err
	}
	if m == nil {
		m = map[string]any{}
	}
	edit(m)
	return json.Marshal(m)
}
