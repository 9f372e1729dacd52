package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/capstan-gpu/capstan/test/fakegpu/state"
)

// driver is the simulated driver in a folder of its own.
type driver struct {
	dir  string
	file *state.File
}

// makeDriver builds the C library and makes a state file with n GPUs of a kind.
func makeDriver(ctx context.Context, root, dir string, n int, kind string) (*driver, error) {
	profile, err := state.ProfileNamed(kind)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	library := filepath.Join(dir, "libnvidia-ml.so.1")
	build := exec.CommandContext(ctx, "make", "-s", "-C", filepath.Join(root, "test/fakegpu/lib"), "OUT="+library)
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the simulated library: %w\n%s", err, out)
	}
	file, err := state.Create(filepath.Join(dir, "state"), "bench", n, profile)
	if err != nil {
		return nil, err
	}
	return &driver{dir: dir, file: file}, nil
}

// environ is what a process needs to find this driver.
func (d *driver) environ() []string {
	return append(os.Environ(), "LD_LIBRARY_PATH="+d.dir, "FAKEGPU_STATE="+filepath.Join(d.dir, "state"))
}

// work makes the GPUs busy: a new sample six times a second, as a real driver's ring has.
func (d *driver) work(ctx context.Context) error {
	ticker := time.NewTicker(time.Second / 6)
	defer ticker.Stop()
	for n := uint32(0); ; n++ {
		for i := range d.file.Count() {
			err := d.file.Update(i, func(g *state.GPU) {
				busy := (n*7 + uint32(i)*11) % 101
				g.Utilization, g.PowerMilliwatts, g.Temperature = busy, 300_000+busy*1000, 40+busy/4
				g.EnergyMillijoules += uint64(g.PowerMilliwatts) / 6
				g.Push(time.Now(), busy)
				g.Activity.Advance(time.Second/6, float64(busy)/100)
				for k := range g.Instances {
					if g.Instances[k].UUID() != "" {
						g.Instances[k].Activity.Advance(time.Second/6, float64(busy)/100)
					}
				}
			})
			if err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}
