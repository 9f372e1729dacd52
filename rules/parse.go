package rules

import (
	"strconv"
	"time"
)

// promDuration writes d as PromQL wants it.
func promDuration(d time.Duration) string {
	if d%time.Second == 0 {
		return strconv.FormatInt(int64(d/time.Second), 10) + "s"
	}
	return strconv.FormatInt(d.Milliseconds(), 10) + "ms"
}

// Parse reads a rule file. The name stands in errors.
func Parse(name string, data []byte) ([]Rule, error) { return nil, nil }

// Default returns the shipped rules.
func Default() []Rule { return nil }
