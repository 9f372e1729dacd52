package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/capstan-gpu/capstan/trainer/agent"
	"github.com/capstan-gpu/capstan/trainer/ring"
)

// job is a StatefulSet with a record, at an API server in memory.
type job struct {
	api    *fake.Clientset
	client *agent.Client
	target target
	record ring.Record
}

func newJob(t *testing.T, replicas int32) *job {
	t.Helper()
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: "training", UID: "uid-1"}, Spec: appsv1.StatefulSetSpec{Replicas: &replicas}}
	api := fake.NewClientset(set)
	return &job{api: api, client: agent.NewClient(api, "ml", "training", ""), target: target{job: "ml/training"}}
}

// put records how the job is.
func (j *job) put(t *testing.T, change func(*ring.Record)) {
	t.Helper()
	first := j.record.Job == ""
	if first {
		j.record = ring.Record{Job: "uid-1", Generation: ring.Generation{Term: 1, Count: 1}, Members: make([]ring.ID, 2), Reason: ring.Start}
	}
	if change != nil {
		change(&j.record)
	}
	s := agent.Stored{Record: j.record}
	if !first {
		s.Version = "1" // which this API server does not look at
	}
	if _, err := j.client.PutRecord(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}

func code(err error) int {
	if err == nil {
		return 0
	}
	if c, ok := errors.AsType[coded](err); ok {
		return c.code
	}
	return -1
}

// wait tells of each change, and its exit code says how the job ended.
func TestWait(t *testing.T) {
	for _, c := range []struct {
		name   string
		end    func(*ring.Record)
		code   int
		stdout string
	}{
		{"success", func(r *ring.Record) { r.End, r.EndStep = ring.Succeeded, 900 }, 0, "ml/training: succeeded at step 900\n"},
		{"failure", func(r *ring.Record) { r.End, r.EndStep, r.EndReason = ring.Failed, 900, "out of memory" }, 1, "ml/training: failed at step 900: out of memory\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newJob(t, 3)
			synctest.Test(t, func(t *testing.T) {
				var stdout, stderr bytes.Buffer
				time.AfterFunc(5*time.Second, func() { j.put(t, nil) })
				time.AfterFunc(15*time.Second, func() {
					j.put(t, func(r *ring.Record) {
						r.Generation.Count, r.Members, r.Step, r.Reason, r.Restarts, r.Crash.Error = 2, make([]ring.ID, 3), 400, ring.Loss, 1, "node lost"
					})
				})
				time.AfterFunc(25*time.Second, func() { j.put(t, c.end) })
				began := time.Now()
				err := wait(t.Context(), j.client, j.target, time.Minute, 2*time.Second, &stdout, &stderr)
				if code(err) != c.code || stdout.String() != c.stdout {
					t.Errorf("code %d (%v), %q; want %d, %q", code(err), err, stdout.String(), c.code, c.stdout)
				}
				if took := time.Since(began); took < 25*time.Second || took > 27*time.Second {
					t.Errorf("it took %s, want a look every 2 s", took)
				}
				if got, want := stderr.String(), `ml/training: waiting for the first ring; 3 replicas
ml/training: generation 1.1, 2 of 3 workers, from step 0 on (start)
ml/training: generation 1.2, 3 of 3 workers, from step 400 on (loss); 1 restarts, the last one: node lost
`; got != want {
					t.Errorf("progress:\n%swant\n%s", got, want)
				}
			})
		})
	}
}

// What cannot be known is 2, and never 0 or 1.
func TestWaitCannotKnow(t *testing.T) {
	var out bytes.Buffer
	short := func(j *job) error {
		return wait(t.Context(), j.client, j.target, 50*time.Millisecond, time.Millisecond, &out, &out)
	}
	j := newJob(t, 1)
	if err := short(j); code(err) != 2 || !strings.Contains(err.Error(), "has not ended within 50ms; last seen: ml/training: waiting for the first ring") {
		t.Errorf("no ring: code %d, %v", code(err), err)
	}
	j.put(t, func(r *ring.Record) { r.Job, r.End = "uid-0", ring.Succeeded })
	if err := short(j); code(err) != 2 {
		t.Errorf("the end of a StatefulSet of the same name that was deleted: code %d, %v", code(err), err)
	}
	j.api.PrependReactor("get", "configmaps", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("connection refused")
	})
	if err := short(j); code(err) != 2 || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("no API server: code %d, %v", code(err), err)
	}
	j.client = agent.NewClient(j.api, "ml", "none", "")
	if err := short(j); code(err) != 2 || !strings.Contains(err.Error(), "read the StatefulSet ml/none") {
		t.Errorf("no StatefulSet: code %d, %v", code(err), err)
	}
}

// reset is for a job that has ended and whose workers are gone.
func TestReset(t *testing.T) {
	var out bytes.Buffer
	j := newJob(t, 0)
	if err := reset(t.Context(), j.client, "ml/training", 2, &out); code(err) != 1 || !strings.Contains(err.Error(), "has not ended") {
		t.Errorf("a job that never began: %v", err)
	}
	j.put(t, nil)
	if err := reset(t.Context(), j.client, "ml/training", 2, &out); code(err) != 1 || !strings.Contains(err.Error(), "has not ended: ml/training: generation 1.1") {
		t.Errorf("a suspended job: %v", err)
	}
	j.put(t, func(r *ring.Record) { r.End, r.EndStep = ring.Succeeded, 900 })
	j.api.PrependReactor("patch", "statefulsets", func(a k8stesting.Action) (bool, runtime.Object, error) {
		if p := a.(k8stesting.PatchActionImpl); p.Subresource != "scale" || string(p.Patch) != `{"spec":{"replicas":2}}` {
			t.Errorf("patch %s of %q", p.Patch, p.Subresource)
		}
		return true, &appsv1.StatefulSet{}, nil
	})
	if err := reset(t.Context(), j.client, "ml/training", 2, &out); err != nil || out.String() != "ml/training: forgotten that it succeeded at step 900\nml/training: 2 replicas\n" {
		t.Errorf("%v, %q", err, out.String())
	}
	if s, err := readJob(t.Context(), j.client, "ml/training"); err != nil || s.Phase != phaseWaiting {
		t.Errorf("afterwards it is %+v, %v", s, err)
	}

	running := newJob(t, 2)
	running.put(t, func(r *ring.Record) { r.End = ring.Failed })
	if err := reset(t.Context(), running.client, "ml/training", -1, &out); code(err) != 1 || !strings.Contains(err.Error(), "still has 2 replicas") {
		t.Errorf("a job with workers: %v", err)
	}
}

// The JSON is for tools: names stay.
func TestStatusJSON(t *testing.T) {
	j := newJob(t, 4)
	j.put(t, func(r *ring.Record) { r.Restarts, r.Crash.Error = 2, "node lost" })
	s, err := readJob(context.Background(), j.client, "ml/training")
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(s)
	if want := `{"job":"ml/training","phase":"Running","generation":"1.1","world":2,"replicas":4,"step":0,"reason":"start","restarts":2,"lastCrash":"node lost"}`; err != nil || string(got) != want {
		t.Errorf("%s, %v; want %s", got, err, want)
	}
}
