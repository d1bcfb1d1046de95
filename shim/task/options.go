package task

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/pelletier/go-toml/v2"
	"google.golang.org/protobuf/types/known/anypb"
)

// decodeOptions reads the options of a Create. ctr and nerdctl send runc's; CRI
// sends its generic ones for every runtime whose name is not runc's; no options
// are as good as empty ones. The result is checked: what is asked for here is
// honoured.
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
		return o, checkOptions(o)
	case *runtimeoptions.Options:
		return genericOptions(o)
	}
	return nil, fmt.Errorf("runtime options are of the unknown type %q: %w", any.TypeUrl, errdefs.ErrInvalidArgument)
}

// genericOptions reads options that are a table of TOML: the section of CRI's
// configuration, or the file that it or a client names instead.
func genericOptions(g *runtimeoptions.Options) (*options.Options, error) {
	body, from := g.ConfigBody, "runtime options"
	if g.ConfigPath != "" {
		var err error
		if body, err = os.ReadFile(g.ConfigPath); err != nil {
			return nil, fmt.Errorf("read runtime options: %w: %w", err, errdefs.ErrInvalidArgument)
		}
		from = fmt.Sprintf("runtime options in %q", g.ConfigPath)
	}
	o, err := parseOptions(body)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w", from, err, errdefs.ErrInvalidArgument)
	}
	return o, checkOptions(o)
}

// parseOptions reads a table with runc's options. A key that is none of them is
// an error, as it would otherwise be a setting without effect.
func parseOptions(body []byte) (*options.Options, error) {
	// Where the table is a section of CRI's configuration these two may stand
	// in it; they have told their tale already.
	t := struct {
		*options.Options
		TypeUrl, ConfigPath string
	}{Options: &options.Options{}}
	d := toml.NewDecoder(bytes.NewReader(body)).DisallowUnknownFields()
	err := d.Decode(&t)
	var unknown *toml.StrictMissingError
	var wrong *toml.DecodeError
	switch {
	case err == nil:
		return t.Options, nil
	case errors.As(err, &unknown):
		return nil, fmt.Errorf("there is no option %q", unknown.Errors[0].Key())
	case errors.As(err, &wrong):
		line, _ := wrong.Position()
		return nil, fmt.Errorf("line %d, option %q: %w", line, wrong.Key(), err)
	}
	return nil, err
}

// checkOptions refuses what cannot be had.
//
// All of runc's options are known. CriuImagePath, TaskApiAddress and
// TaskApiVersion are for containerd, which acts on them before it calls a shim;
// CriuWorkPath has nothing to say, as the logs of a dump or restore are kept
// with its images.
func checkOptions(o *options.Options) error {
	if o.BinaryName != "" {
		return fmt.Errorf("runtime option BinaryName is %q: this runtime runs containers itself and no such program, leave it out: %w", o.BinaryName, errdefs.ErrInvalidArgument)
	}
	if o.Root != "" && !filepath.IsAbs(o.Root) {
		return fmt.Errorf("runtime option Root is %q, not an absolute path: %w", o.Root, errdefs.ErrInvalidArgument)
	}
	return nil
}
