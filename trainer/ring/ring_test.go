package ring

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "rewrite the transcripts")

// TestTranscripts plays testdata/*.txt: commands, dashes, and what came of them. -update rewrites the latter; reading the diff is the review.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no transcripts", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got, err := transcript(string(want))
			if err != nil {
				t.Fatal(err)
			}
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(want) {
				gotLines, wantLines := strings.Split(got, "\n"), strings.Split(string(want), "\n")
				for i := range max(len(gotLines), len(wantLines)) {
					g, w := at(gotLines, i), at(wantLines, i)
					if g != w {
						t.Fatalf("%s:%d:\n got %s\nwant %s", file, i+1, g, w)
					}
				}
			}
		})
	}
}

func at(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "(end)"
}

// transcript plays the commands of a text and puts what they came to behind each block of them.
func transcript(text string) (string, error) {
	var c *cluster
	cfg := Config{Job: "job-1", Version: "v1", ChangeInterval: 20 * time.Second}
	var out strings.Builder
	output := false
	for _, line := range strings.Split(strings.TrimRight(text, "\n"), "\n") {
		switch {
		case output:
			output = line != ""
			if !output {
				out.WriteString("\n")
			}
		case line == "----":
			output = true
			out.WriteString("----\n")
			if c.model.broken != "" {
				return "", fmt.Errorf("broken: %s\n%s", c.model.broken, strings.Join(c.log, "\n"))
			}
			for _, l := range append(c.log, c.state()...) {
				out.WriteString(l + "\n")
			}
			c.log = nil
		case line == "" || strings.HasPrefix(line, "#"):
			out.WriteString(line + "\n")
		default:
			out.WriteString(line + "\n")
			if c == nil && !strings.HasPrefix(line, "config ") {
				c = newCluster(cfg, nil)
			}
			var err error
			if c == nil {
				err = configure(&cfg, strings.Fields(line)[1:])
			} else {
				err = command(c, line)
			}
			if err != nil {
				return "", fmt.Errorf("%q: %w", line, err)
			}
		}
	}
	return out.String(), nil
}

// TestDeterministic is what a transcript cannot say: the same history gives the same log, byte by byte.
func TestDeterministic(t *testing.T) {
	text, err := os.ReadFile("testdata/11-split.txt")
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if got, err := transcript(string(text)); err != nil || got != string(text) {
			t.Fatalf("another log than before, or %v", err)
		}
	}
}

func configure(cfg *Config, words []string) error {
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		n, _ := strconv.Atoi(value)
		d, _ := time.ParseDuration(value)
		switch key {
		case "min":
			cfg.Min = n
		case "unit":
			cfg.WorldUnit = n
		case "restarts":
			cfg.MaxRestarts = n
		case "fixed":
			cfg.FixedCoordinator = true
		case "quarantine":
			cfg.Quarantine = true
		case "regrowWait":
			cfg.RegrowWait = d
		case "changeInterval":
			cfg.ChangeInterval = d
		case "quiesceTimeout":
			cfg.QuiesceTimeout = d
		default:
			return fmt.Errorf("%q?", w)
		}
	}
	return nil
}

// command is one line of a transcript.
func command(c *cluster, line string) error {
	words := strings.Fields(line)
	numbers := make([]int, len(words))
	for i, w := range words {
		numbers[i], _ = strconv.Atoi(w)
	}
	each := func(do func(*process)) error {
		for _, ordinal := range numbers[1:] {
			p := c.pods[ordinal]
			if p == nil || p.process == nil {
				return fmt.Errorf("no worker-%d", ordinal)
			}
			do(p.process)
		}
		return nil
	}
	switch words[0] {
	case "replicas": // of the StatefulSet
		c.scale(numbers[1])
	case "no-gpu": // for these ordinals: their pods stay Pending
		for _, ordinal := range numbers[1:] {
			c.noGPU[ordinal] = true
		}
	case "gpu": // for these, at last
		for _, ordinal := range numbers[1:] {
			delete(c.noGPU, ordinal)
			if p := c.pods[ordinal]; p != nil {
				c.boot(p)
			}
		}
	case "until": // lets time pass
		d, err := time.ParseDuration(words[1])
		if err != nil {
			return err
		}
		c.run(c.start.Add(d).Sub(c.now))
	case "kill": // the process of these ordinals, with SIGKILL: the container starts again
		return each(c.kill)
	case "delete": // the pods of these ordinals: SIGTERM, then another pod of that name
		return each(func(p *process) { c.terminate(p.pod) })
	case "lose-node": // of these ordinals: silent, and Kubernetes keeps the pod for minutes
		return each(func(p *process) { p.pod.process, p.alive = nil, false; c.noGPU[p.id.Ordinal] = true })
	case "freeze": // SIGSTOP
		return each(func(p *process) { p.frozen = true })
	case "cut": // these off from the others, and from the API server
		return each(func(p *process) { c.sides[p] = 1 })
	case "heal":
		clear(c.sides)
	case "force-delete": // the pods of these ordinals: the API server forgets them, the processes go on
		for _, ordinal := range numbers[1:] {
			c.forceDelete(c.pods[ordinal])
		}
	case "crash": // crash 1 loss is NaN: the child of that ordinal dies
		p := c.pods[numbers[1]].process
		c.crash(p, strings.Join(words[2:], " "))
	case "crash-at": // crash-at 35 1 bad batch: it dies in that step, every time
		c.crashAt[numbers[2]] = map[int64]string{int64(numbers[1]): strings.Join(words[3:], " ")}
	case "slow": // slow 3 2.5: it computes so many times longer
		f, err := strconv.ParseFloat(words[2], 64)
		c.slowness[numbers[1]] = f
		return err
	case "clock": // clock 1 -1h: that ordinal's is off by so much
		d, err := time.ParseDuration(words[2])
		c.skew[numbers[1]] = d
		return err
	case "applies-late": // applies-late 1 2s: that ordinal takes so long to apply what all have summed up
		d, err := time.ParseDuration(words[2])
		c.lateBy[numbers[1]] = d
		return err
	case "last-step":
		c.lastStep = int64(numbers[1])
	case "copy-takes": // to copy a state, from now on
		d, err := time.ParseDuration(words[1])
		c.copying = d
		return err
	case "grace": // terminationGracePeriodSeconds
		c.grace = time.Duration(numbers[1]) * time.Second
	case "version": // of pods made from now on
		c.version = words[1]
	case "checkpoint": // the state of these ordinals is saved
		return each(func(p *process) { c.save(p.child.state) })
	default:
		return fmt.Errorf("unknown command")
	}
	return nil
}
