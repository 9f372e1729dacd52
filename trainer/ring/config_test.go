package ring

import (
	"strings"
	"testing"
	"time"
)

func TestValidate(t *testing.T) {
	if err := (Config{Job: "u"}).Validate(); err != nil {
		t.Errorf("the zero value with a job: %v", err)
	}
	bad := func(c Config, want ...string) {
		t.Helper()
		if c.Job == "" {
			c.Job = "u"
		}
		err := c.Validate()
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("Validate() = %v, want %q in it", err, w)
			}
		}
	}
	if err := (Config{}).Validate(); err == nil || !strings.Contains(err.Error(), "UID of the StatefulSet") {
		t.Errorf("no job: %v", err)
	}
	bad(Config{Min: -1}, "Min -1", "0 to 4096", "at least 1")
	bad(Config{Heartbeat: time.Microsecond}, "Heartbeat 1µs", "10ms")
	bad(Config{DeadAfter: 1500 * time.Millisecond}, "DeadAfter 1.5s", "2s", "raise it or lower Heartbeat")
	bad(Config{SettleMax: time.Second}, "SettleMax 1s", "Settle, 3s")
	bad(Config{StragglerRatio: 1}, "StragglerRatio 1", "more than 1")
	bad(Config{WorldUnit: 4, WorldSizes: []int{4, 6}}, "WorldSizes 6", "multiple of WorldUnit 4")
	bad(Config{Min: 5, WorldSizes: []int{2, 4}}, "WorldSizes up to 4", "Min, 5", "lower Min")
}

func TestWorld(t *testing.T) {
	for _, test := range []struct {
		cfg     Config
		n, want int
	}{
		{Config{}, 0, 0},
		{Config{}, 5, 5},
		{Config{Min: 3}, 2, 0},
		{Config{WorldUnit: 4}, 11, 8},
		{Config{WorldUnit: 4}, 3, 0},
		{Config{WorldSizes: []int{1, 2, 8}}, 7, 2},
		{Config{Min: 3, WorldSizes: []int{1, 2, 8}}, 7, 0},
	} {
		if got := test.cfg.withDefaults().world(test.n); got != test.want {
			t.Errorf("%+v: world(%d) = %d, want %d", test.cfg, test.n, got, test.want)
		}
	}
}
