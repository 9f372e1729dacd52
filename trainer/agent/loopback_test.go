package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// Agents over real connections, in real time: with a shared secret and no API server, where the first ordinal is found by its name; and
// with tokens and a lease, which names the coordinator's address and key.
func TestLoopback(t *testing.T) {
	t.Run("fixed, secret", func(t *testing.T) {
		t.Parallel()
		first := listen(t)
		_, port, _ := net.SplitHostPort(first.Addr().String())
		loopback(t, ring.Config{FixedCoordinator: true}, func(self Peer, log *slog.Logger) (Cluster, Authenticator) {
			return NewFixed(self.ID, 0, "localhost:"+port, log), secret(t, good)
		}, first)
	})
	t.Run("lease, tokens", func(t *testing.T) {
		t.Parallel()
		api, keys, dir := newAPIServer(), newTokens(t), t.TempDir()
		loopback(t, ring.Config{}, func(self Peer, log *slog.Logger) (Cluster, Authenticator) {
			file := filepath.Join(dir, fmt.Sprint(self.ID.Ordinal))
			token := keys.sign(t, "ec", func(c jwt.MapClaims) {
				c["kubernetes.io"] = map[string]any{"namespace": "ml", "pod": map[string]string{"name": fmt.Sprintf("training-%d", self.ID.Ordinal), "uid": self.ID.Pod}}
			})
			if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
				t.Fatal(err)
			}
			api.mu.Lock()
			api.replicas = 3
			if !slices.ContainsFunc(api.pods, func(p ring.Pod) bool { return p.UID == self.ID.Pod }) {
				api.pods = append(slices.Clone(api.pods), ring.Pod{Ordinal: self.ID.Ordinal, UID: self.ID.Pod, Running: true})
			}
			wake(api.changes)
			api.mu.Unlock()
			see := seenBy{api, self.ID.Ordinal}
			return NewKubernetes(KubernetesConfig{Self: self, StatefulSet: "training", Leases: see, Records: see, Workload: see, Logger: log}),
				NewToken(TokenConfig{File: file, Audience: Audience("ml", "training"), Namespace: "ml", StatefulSet: "training", Keys: keys.keys})
		}, listen(t))
	})
}

// loopback has three workers go 2→3→2 three times, and then loses one.
func loopback(t *testing.T, cfg ring.Config, surroundings func(Peer, *slog.Logger) (Cluster, Authenticator), first net.Listener) {
	cfg.ChangeInterval, cfg.Settle = 200*time.Millisecond, 300*time.Millisecond
	w := newWorld(t, cfg)
	w.latency = 100 * time.Microsecond
	w.compute = 2 * time.Millisecond
	start := func(ordinal int, l net.Listener) *worker {
		t.Helper()
		identity, err := NewIdentity()
		if err != nil {
			t.Fatal(err)
		}
		ctx, kill := context.WithCancel(w.ctx)
		log := slog.New(slog.DiscardHandler)
		id := ring.ID{Ordinal: ordinal, Pod: fmt.Sprintf("u%d", ordinal), Boot: time.Now().UnixNano()}
		k := &worker{id: id, trainer: &listTrainer{world: w, id: id}, kill: kill, done: make(chan struct{})}
		self, book := Peer{ID: id, Address: l.Addr().String(), Key: identity.Key()}, &Book{}
		cluster, auth := surroundings(self, log)
		k.agent, err = New(Config{
			Ring: w.cfg, Self: self, Trainer: k.trainer, Book: book, Logger: log, Cluster: cluster,
			Transport: NewTCP(TCPConfig{Job: w.cfg.Job, Self: self, Identity: identity, Auth: auth, Book: book, Listener: l, Logger: log}),
		})
		if err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		w.workers[ordinal] = k
		w.all = append(w.all, k)
		w.mu.Unlock()
		go func() {
			defer close(k.done)
			k.exit, k.err = k.agent.Run(ctx)
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.workers[ordinal] == k {
				delete(w.workers, ordinal)
			}
		}()
		return k
	}
	generation := func() ring.Generation { return w.all[0].agent.Status().member.Generation }
	var planned []time.Duration

	start(0, first)
	start(1, listen(t))
	w.until(time.Minute, "a ring of 2", w.running(2, ring.Generation{}))
	for range 3 {
		before := generation()
		k := start(2, listen(t))
		w.until(time.Minute, "a ring of 3", w.running(3, before))
		planned = append(planned, w.pause(0))
		before = generation()
		k.agent.Drain()
		w.until(time.Minute, "a ring of 2 again", w.running(2, before))
		planned = append(planned, w.pause(0))
		<-k.done
		if k.err != nil || k.exit.Reason != "released" {
			t.Errorf("the leaver ended with %+v, %v; want it released", k.exit, k.err)
		}
	}
	if w.redone != 0 {
		t.Errorf("%d steps were done again by planned changes, want 0", w.redone)
	}
	before := generation()
	began := time.Now()
	w.workers[1].kill()
	w.until(time.Minute, "a ring of 1", w.running(1, before))
	lost := time.Since(began)
	w.check()
	if w.redone > 1 {
		t.Errorf("%d steps were done again after one loss, want 1 at most", w.redone)
	}
	slices.Sort(planned)
	t.Logf("pause of planned changes %v, of a loss %v", planned, lost)
	if p := planned[len(planned)/2]; p > 2*time.Second {
		t.Errorf("planned changes paused %s in the middle, want far less than 2 s", p)
	}
}
