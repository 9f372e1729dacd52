package podmap

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "rewrite the transcripts; commit a changed one only if you understand the change")

// TestTranscripts plays testdata/*.txt: commands, "----", what is known then. Read them, they are the specification.
//
//	sync TIME [NS/POD=UID[,PHASE]]…      all live pods           ask TIME             a call of pod-resources begins
//	update TIME NS/POD=UID[,PHASE]       news of one             answer TIME [NS/POD[/CONTAINER[@RESOURCE]]=ID[+ID]]…
//	remove TIME UID                      it ended                fail TIME REASON     the call failed
//	lost TIME                            the Pods API is away
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := play(t, string(want))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s (-want +got; rewrite with: go test ./exporter/podmap -update)\n%s", file, diff)
			}
		})
	}
}

func play(t *testing.T, script string) string {
	var out strings.Builder
	c := NewCore(30 * time.Second)
	var now time.Time
	skip := false
	for line := range strings.Lines(strings.TrimRight(script, "\n") + "\n") {
		line = strings.TrimRight(line, "\n")
		switch {
		case line == "":
			skip = false
		case skip:
			continue
		case line == "----":
			fmt.Fprintf(&out, "----\n%s\n", show(c.Mapping(now), now))
			skip = true
			continue
		case !strings.HasPrefix(line, "#"):
			now = command(t, c, strings.Fields(line))
		}
		if line != "" {
			fmt.Fprintln(&out, line)
		}
	}
	return strings.TrimRight(out.String(), "\n") + "\n"
}

var epoch = time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)

func command(t *testing.T, c *Core, f []string) time.Time {
	t.Helper()
	d, err := time.ParseDuration(f[1])
	if err != nil {
		t.Fatalf("%v: %v", f, err)
	}
	now := epoch.Add(d)
	switch f[0] {
	case "sync":
		c.Sync(now, podsOf(t, f[2:]))
	case "update":
		c.Update(now, podsOf(t, f[2:])[0])
	case "remove":
		c.Remove(now, f[2])
	case "lost":
		c.PodsLost(now, ReasonUnreachable, "away")
	case "ask":
		c.Ask(now)
	case "fail":
		c.Failed(f[2], "fails")
	case "answer":
		c.Answered(now, holders(f[2:]))
	default:
		t.Fatalf("unknown command %q", f[0])
	}
	return now
}

func podsOf(t *testing.T, words []string) (pods []Pod) {
	t.Helper()
	for _, w := range words {
		path, rest, ok := strings.Cut(w, "=")
		namespace, name, ok2 := strings.Cut(path, "/")
		if !ok || !ok2 {
			t.Fatalf("%q is not NS/POD=UID", w)
		}
		uid, phase, _ := strings.Cut(rest, ",")
		p := Pod{Namespace: namespace, Name: name, UID: uid, Phase: phase}
		if phase == "" {
			p.Phase = "Running"
		}
		if phase == "Terminating" {
			p.Phase, p.Terminating = "Running", true
		}
		pods = append(pods, p)
	}
	return pods
}

func holders(words []string) (a Answer) {
	for _, w := range words {
		path, ids, _ := strings.Cut(w, "=")
		path, resource, found := strings.Cut(path, "@")
		if !found {
			resource = "nvidia.com/gpu"
		}
		p := append(strings.SplitN(path, "/", 3), "main")
		a = append(a, Holder{Namespace: p[0], Pod: p[1], Container: p[2], Resource: resource, DeviceIDs: strings.Split(ids, "+")})
	}
	return a
}

func show(m Mapping, now time.Time) string {
	var b strings.Builder
	if m.At.IsZero() {
		b.WriteString("no mapping\n")
	} else {
		fmt.Fprintf(&b, "mapping of %s, age %s\n", m.At.Sub(epoch), now.Sub(m.At))
	}
	for _, a := range m.Allocations {
		shared := ""
		if a.Shared {
			shared = " shared"
		}
		fmt.Fprintf(&b, "  %s (%s) %s/%s %s %s%s\n", a.DeviceID, a.UUID, a.Namespace, a.Pod, a.PodUID, a.Container, shared)
	}
	if len(m.Unbound) > 0 {
		fmt.Fprintf(&b, "  unbound %v\n", m.Unbound)
	}
	for reason, n := range m.Errors {
		if reason == ReasonAmbiguous && n > 0 {
			fmt.Fprintf(&b, "  %s %d\n", reason, n)
		}
	}
	return b.String()
}

// A node that does what it likes, and a kubelet whose Pods API is late: the core never says that a device is in the hands of a
// pod that did not hold it in the answer it names, and never names a pod that the Pods API said is gone.
func TestNeverTheWrongPod(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type life struct{ uid, device string }
		c := NewCore(30 * time.Second)
		now := epoch
		c.Sync(now, nil)
		alive := map[string]life{}              // by pod name: the truth
		history := map[string]map[string]bool{} // uid to the devices that it held in its life: at most one
		gone := map[string]bool{}               // UIDs whose end was announced
		var news []func()                       // announcements that are under way, in order
		next := 0
		steps := rapid.IntRange(1, 60).Draw(t, "steps")
		for range steps {
			now = now.Add(time.Duration(rapid.IntRange(1, 1500).Draw(t, "ms")) * time.Millisecond)
			switch rapid.IntRange(0, 4).Draw(t, "what") {
			case 0: // a pod comes, and takes a device that is free
				name := rapid.SampledFrom([]string{"web-0", "web-1"}).Draw(t, "name")
				device := rapid.SampledFrom([]string{"GPU-1", "GPU-2"}).Draw(t, "device")
				taken := slices.ContainsFunc([]string{"web-0", "web-1"}, func(n string) bool { return alive[n].device == device })
				if _, ok := alive[name]; ok || taken {
					continue
				}
				next++
				uid := fmt.Sprint("u", next)
				alive[name] = life{uid, device}
				history[uid] = map[string]bool{device: true}
				news = append(news, func() { c.Update(now, Pod{Namespace: "a", Name: name, UID: uid, Phase: "Running"}) })
			case 1: // a pod goes
				name := rapid.SampledFrom([]string{"web-0", "web-1"}).Draw(t, "name")
				l, ok := alive[name]
				if !ok {
					continue
				}
				delete(alive, name)
				news = append(news, func() { c.Remove(now, l.uid); gone[l.uid] = true })
			case 2: // some of the news arrive
				n := rapid.IntRange(0, len(news)).Draw(t, "news")
				for _, f := range news[:n] {
					f()
				}
				news = news[n:]
			default: // a poll; news are never late by more than one
				for _, f := range news {
					f()
				}
				news = nil
				c.Ask(now)
				var a Answer
				for name, l := range alive {
					a = append(a, Holder{Namespace: "a", Pod: name, Resource: "nvidia.com/gpu", DeviceIDs: []string{l.device}})
				}
				c.Answered(now, a)
			}
			for _, a := range c.Mapping(now).Allocations {
				if !history[a.PodUID][a.UUID] {
					t.Fatalf("%s is said to be held by %s, which never held it", a.UUID, a.PodUID)
				}
				if gone[a.PodUID] {
					t.Fatalf("%s is said to be held by %s, which is gone", a.UUID, a.PodUID)
				}
			}
		}
	})
}
