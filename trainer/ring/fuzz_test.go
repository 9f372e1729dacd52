package ring

import (
	"slices"
	"testing"
	"time"
)

// FuzzHistory lets the bytes say what happens to a small job, and the model say whether a rule was broken. The first byte seeds the
// chance and chooses the kind of coordinator.
func FuzzHistory(f *testing.F) {
	f.Add([]byte{0, 0, 1, 2, 3, 4})
	f.Add([]byte{3, 5, 5, 1, 6, 0, 10, 4})
	f.Add([]byte{8, 9, 3, 1, 1, 4, 7, 2, 2, 11, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) == 0 || len(data) > 60 {
			return
		}
		cfg := hasty()
		cfg.FixedCoordinator = data[0]%2 == 1
		cfg.Min = int(data[0]/2) % 3
		h := newHistory(cfg, uint64(data[0]))
		for _, b := range data[1:] {
			h.happen(int(b) % things)
			h.run(time.Duration(b/things) * 50 * time.Millisecond)
			if h.model.broken != "" {
				t.Fatal(h.model.broken)
			}
		}
	})
}

// FuzzNode gives one node events that make no sense, in any order, from anybody. It must not panic, nor take back a promise, nor go to a
// generation that is older than one it was in or than one it promised.
func FuzzNode(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16})
	f.Add([]byte{0, 0, 1, 1, 5, 1, 5, 2, 3, 3, 8, 1, 2, 5, 3})
	f.Fuzz(func(t *testing.T, data []byte) {
		next := func() int {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return int(b)
		}
		now := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
		ids := []ID{{0, "a", 1}, {1, "b", 1}, {1, "b", 2}, {1, "c", 1}, {10, "d", 1}}
		cfg := hasty()
		cfg.FixedCoordinator = next()%4 == 0
		self := ids[next()%len(ids)]
		n, err := New(cfg, self)
		if err != nil {
			t.Fatal(err)
		}
		id := func() ID { return ids[next()%len(ids)] }
		generation := func() Generation { b := next(); return Generation{uint32(b % 3), uint32(b / 3 % 4)} }
		record := func() Record {
			r := Record{Job: "job-1", Generation: generation(), Step: int64(next() % 4), Base: generation(), Version: "v1"}
			for i := next() % 32; i > 0; i /= 2 {
				if m := id(); !r.has(m) {
					r.Members = append(r.Members, m)
				}
			}
			slices.SortFunc(r.Members, ID.Compare)
			if next()%16 == 0 {
				r.End = Succeeded
			}
			return r
		}
		phases := []Phase{Joining, Standby, Syncing, Running, Quiescing, Aborting, Stopped, Paused, AtEnd, Left, Over, "nonsense"}
		kinds := []Kind{Hello, Propose, Commit, Run, Retire, Release, Save, Reload, Wait, End, "nonsense"}
		var promised, in Generation
		writing := Record{}
		for len(data) > 0 {
			var e Event
			switch next() % 16 {
			case 0:
				e = Leader{Term: uint32(next() % 4), Holder: id(), Record: record()}
			case 1, 2, 3:
				rec := record()
				e = Message{Job: "job-1", From: id(), To: self, Order: &Order{Kind: kinds[next()%len(kinds)], Term: uint32(next() % 4), Generation: generation(), Abort: next()%2 == 0, Record: &rec, Source: id(), Behind: rec.Members}}
			case 4, 5, 6:
				e = Message{Job: "job-1", From: id(), To: self, Report: &Report{
					Seq: uint64(next()), Phase: phases[next()%len(phases)], Version: "v1", Leaving: next()%8 == 0, Term: uint32(next() % 4), Warms: next() % 3,
					Promised: generation(), Generation: generation(), Position: Position{generation(), int64(next()%5) - 1}, Entered: generation(),
					Synced: next()%2 == 0, Hash: uint64(next() % 3), Lost: []ID{id()}, Crashes: next() % 3, Compute: time.Duration(next()),
				}}
			case 7:
				e = Pods{Replicas: next() % 4, Pods: []Pod{{Ordinal: 0, UID: "a", Running: true}, {Ordinal: 1, UID: "b", Running: true}}}
			case 8:
				e = Warmed{Step: int64(next() % 4)}
			case 9:
				e = Synced{generation(), uint64(next() % 3)}
			case 10:
				e = StepDone{Generation: generation(), Step: int64(next() % 6), QuiesceAt: int64(next() % 6)}
			case 11:
				e = Aborted{generation(), int64(next()%6) - 1}
			case 12:
				e = PeerLost{generation(), id()}
			case 13:
				e = Crashed{"boom"}
			case 14:
				e = Recorded{writing.Generation, writing.End}
			case 15:
				switch next() % 4 {
				case 0:
					e = Leave{now.Add(time.Duration(next()) * 100 * time.Millisecond)}
				case 1:
					e = Finished{generation()}
				case 2:
					e = Saved{int64(next() % 4)}
				case 3:
					e = NotRecorded{writing.Generation, writing.End}
				}
			}
			now = now.Add(time.Duration(next()) * 10 * time.Millisecond)
			before := n.Status()
			actions := n.Step(e, now)
			if done, ok := e.(StepDone); ok && n.Status().Step != before.Step && (done.Generation != before.Generation || done.Step != before.Step+1) && n.Status().Phase != Joining {
				t.Fatalf("%+v moved the state from step %d to %d in generation %s", done, before.Step, n.Status().Step, before.Generation)
			}
			actions = append(actions, n.Tick(now)...)
			for _, a := range actions {
				switch a := a.(type) {
				case Send:
					if r := a.Message.Report; r != nil {
						if r.Promised.Compare(promised) < 0 {
							t.Fatalf("promised %s after %s", r.Promised, promised)
						}
						promised = r.Promised
					}
				case StartGeneration:
					if a.Generation.Compare(in) <= 0 || a.Generation.Compare(promised) < 0 {
						t.Fatalf("starts %s after %s, having promised %s", a.Generation, in, promised)
					}
					in = a.Generation
				case RunGeneration:
					if a.Generation != in {
						t.Fatalf("runs %s in %s", a.Generation, in)
					}
				case WriteRecord:
					writing = a.Record
				}
			}
		}
	})
}
