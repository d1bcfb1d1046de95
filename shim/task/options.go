package task

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/anypb"
)

// decodeOptions reads the options of a Create. ctr and nerdctl send runc's; CRI
// sends its generic ones for every runtime whose name is not runc's; no options
// are as good as empty ones.
func decodeOptions(any *anypb.Any) (*options.Options, error) {
	if any.GetTypeUrl() == "" {
		return &options.Options{}, nil
	}
	v, err := typeurl.UnmarshalAny(any)
	if err != nil {
		return nil, fmt.Errorf("decode runtime options: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	switch o := v.(type) {
	case *options.Options:
		return o, nil
	case *runtimeoptions.Options:
		return parseOptions(string(o.ConfigBody))
	}
	return nil, fmt.Errorf("runtime options are of the unknown type %q: %w", any.TypeUrl, errdefs.ErrInvalidArgument)
}

// parseOptions reads the options section of CRI's configuration, which is a
// flat table of TOML as containerd writes it: one "key = value" a line.
func parseOptions(body string) (*options.Options, error) {
	o := &options.Options{}
	for line := range strings.Lines(body) {
		key, value, ok := strings.Cut(line, "=")
		if !ok {
			continue
		}
		if err := setOption(o, strings.TrimSpace(key), strings.TrimSpace(value)); err != nil {
			return nil, fmt.Errorf("runtime option %q: %w: %w", strings.TrimSpace(line), err, errdefs.ErrInvalidArgument)
		}
	}
	return o, nil
}

// setOption sets the options that have a meaning here and skips all others.
func setOption(o *options.Options, key, value string) (err error) {
	number := func(to *uint32) error {
		n, err := strconv.ParseUint(value, 10, 32)
		*to = uint32(n)
		return err
	}
	switch key {
	case "Root":
		o.Root = strings.Trim(value, `'"`)
	case "ShimCgroup":
		o.ShimCgroup = strings.Trim(value, `'"`)
	case "SystemdCgroup":
		o.SystemdCgroup, err = strconv.ParseBool(value)
	case "NoPivotRoot":
		o.NoPivotRoot, err = strconv.ParseBool(value)
	case "NoNewKeyring":
		o.NoNewKeyring, err = strconv.ParseBool(value)
	case "IoUid":
		err = number(&o.IoUid)
	case "IoGid":
		err = number(&o.IoGid)
	}
	return err
}
