package shell

import "encoding/json"

// savedState is a State as it is kept with a checkpoint.
type savedState struct {
	Status  int      `json:"status"`
	Flags   string   `json:"flags"`
	Dir     string   `json:"dir"`
	Umask   string   `json:"umask"`
	Exports string   `json:"exports"`
	Traps   string   `json:"traps,omitempty"`
	Prompts []string `json:"prompts,omitempty"`
}

// MarshalJSON keeps all that the next step needs.
func (s State) MarshalJSON() ([]byte, error) {
	return json.Marshal(savedState{s.Status, s.Flags, s.Dir, s.Umask, s.Exports, s.traps, s.prompts})
}

// UnmarshalJSON is the reverse of MarshalJSON.
func (s *State) UnmarshalJSON(b []byte) error {
	var v savedState
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	*s = State{Status: v.Status, Flags: v.Flags, Dir: v.Dir, Umask: v.Umask, Exports: v.Exports, traps: v.Traps, prompts: v.Prompts}
	return nil
}
