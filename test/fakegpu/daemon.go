package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/capstan-gpu/capstan/test/fakegpu/sim"
	"github.com/capstan-gpu/capstan/test/fakegpu/state"
)

// imageLibrary is where the image of this program has the compiled library.
const imageLibrary = "/fakegpu-image/libnvidia-ml.so.1"

func libraryIn(dir string) string { return filepath.Join(dir, "lib", "libnvidia-ml.so.1") }

// install puts the library into the node's folder, as a new file: who has the old one mapped keeps it.
func install(library, dir string) error {
	data, err := os.ReadFile(library)
	if err != nil {
		return fmt.Errorf("read the library: %w (make -C test/fakegpu/lib compiles it; --library names it)", err)
	}
	target := libraryIn(dir)
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(target+".new", data, 0o755); err != nil {
		return err
	}
	return os.Rename(target+".new", target)
}

const (
	followEvery = 100 * time.Millisecond
	busyReach   = 3 * time.Second  // a file that was not written for so long is that of a process that is gone
	busyForget  = 60 * time.Second // then it is removed
)

// follow brings the state to what the workers say, ten times a second, until ctx ends.
func follow(ctx context.Context, file *state.File, busy string) error {
	models := make([]sim.Model, file.Count())
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		now := time.Now()
		shares, err := readShares(busy, now)
		if err != nil {
			return err
		}
		for i := range models {
			if err := file.Update(i, func(g *state.GPU) { models[i].Step(g, shares, now) }); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// readShares adds up the busy shares of each GPU's workers, by UUID. A file is named after a device id: UUID, or UUID::N.
// What is old, or no share between 0 and 1, counts nothing.
func readShares(busy string, now time.Time) (map[string]float64, error) {
	entries, err := os.ReadDir(busy)
	if err != nil {
		return nil, fmt.Errorf("read how busy the workers are: %w", err)
	}
	shares := map[string]float64{}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		path := filepath.Join(busy, e.Name())
		switch age := now.Sub(info.ModTime()); {
		case age > busyForget:
			_ = os.Remove(path) // at the next look, then
			continue
		case age > busyReach:
			continue
		}
		data, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		share, err := strconv.ParseFloat(strings.TrimSpace(string(data)), 64)
		if err != nil || !(share >= 0 && share <= 1) {
			continue
		}
		uuid, _, _ := strings.Cut(e.Name(), "::")
		shares[uuid] += share
	}
	return shares, nil
}
