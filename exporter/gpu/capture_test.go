package gpu

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

// What was recorded makes the same readings again, whatever the driver did.
func TestReplayIsTheRecording(t *testing.T) {
	whole := newScripted("GPU-a", 50)
	whole.given = map[uint32]value{74: {number: 2.5e9}, 138: {number: 3}, 139: {number: 4}, 197: {number: 5, narrow: true}, 3: {code: unknown}, 230: {number: 2}}
	whole.counters = map[string]shares{"GPU-a": {graphicsUtil: 90, smUtil: 60, dramUtil: 30}}
	whole.running, whole.worked = []process{{10, 1 << 30}, {20, 1<<64 - 1}}, []processSample{{10, 1000, 40}}
	divided := newScripted("GPU-b", 0)
	divided.codes["rates"] = notSupported
	divided.counters = map[string]shares{"MIG-1": {graphicsUtil: 100, smUtil: 50}}
	divided.parts = []instance{{device: divided, id: "MIG-1", profile: "1g.10gb", gpuInstance: 7}}
	s := &script{openErr: ErrDriverNotLoaded, gpus: []*scripted{whole, divided}}

	var capture bytes.Buffer
	config := Config{Detail: true, PodOf: func(uint32) string { return "u1" }}
	recording := config
	recording.Record = &capture
	r := newReader(s, recording)
	var want []Reading
	for i := range 60 {
		switch i {
		case 5:
			s.openErr = nil
		case 20:
			s.events = []event{{"GPU-a", 79}, {"GPU-b", 31}}
			whole.codes["rates"] = gpuIsLost
		case 40:
			delete(whole.codes, "rates")
			whole.percent = 4_000_000_000
		}
		want = append(want, r.Read(noon.Add(time.Duration(i)*time.Second)))
	}
	got, err := Replay(&capture, config)
	if err != nil || len(got) != len(want) {
		t.Fatalf("%d readings, %v; want %d", len(got), err, len(want))
	}
	for i := range want {
		want[i].Costs, got[i].Costs = nil, nil // not a matter of what was answered
		if fmt.Sprint(want[i].Err) != fmt.Sprint(got[i].Err) {
			t.Errorf("reading %d: %v, want %v", i, got[i].Err, want[i].Err)
		}
		want[i].Err, got[i].Err = nil, nil
		if !reflect.DeepEqual(got[i], want[i]) {
			t.Fatalf("reading %d:\n%+v\nwant\n%+v", i, got[i], want[i])
		}
	}
}

// full is a writer without room.
type full struct{ left int }

func (f *full) Write(b []byte) (int, error) {
	if f.left -= len(b); f.left < 0 {
		return 0, errors.New("no space left on device")
	}
	return len(b), nil
}

func TestAFullDiskEndsTheRecordingOnly(t *testing.T) {
	r := newReader(&script{gpus: []*scripted{newScripted("GPU-a", 50)}}, Config{Record: &full{left: 500}})
	if d := after(r, 0, 11).Devices[0]; !near(d.Busy, 5) {
		t.Errorf("busy %g, want 5", d.Busy)
	}
}

func TestNoCapture(t *testing.T) {
	for text, want := range map[string]string{
		"{\"read\":\"2026-12-01T12:00:00Z\"}\nhello\n": "line 2",
		"{}\n": "neither read nor call",
	} {
		if _, err := Replay(strings.NewReader(text), Config{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

// A capture comes with a bug report, from anybody. Whatever it holds, busy time never exceeds observed time, nor a share 1.
func FuzzReplay(f *testing.F) {
	var capture bytes.Buffer
	g := newScripted("GPU-a", 50)
	g.counters = map[string]shares{"GPU-a": {graphicsUtil: 90, smUtil: 60}}
	r := newReader(&script{gpus: []*scripted{g}}, Config{Record: &capture, Detail: true})
	after(r, 0, 3)
	f.Add(capture.Bytes())
	f.Fuzz(func(t *testing.T, text []byte) {
		readings, err := Replay(bytes.NewReader(text), Config{Detail: true})
		if err != nil {
			return
		}
		for _, reading := range readings {
			for _, d := range reading.Devices {
				if d.Busy < 0 || d.Busy > d.Observed+1e-9 || d.Utilization != nil && !(*d.Utilization >= 0 && *d.Utilization <= 1) {
					t.Fatalf("%+v", d)
				}
			}
		}
	})
}
