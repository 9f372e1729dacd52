package adapter

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/capstan-gpu/capstan/rules"
)

// TestEvents: two replicas that see the same write one event; an API server that refuses them costs no more than a line in the log.
func TestEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset()
		var log bytes.Buffer
		start := func() (*events, func()) {
			e := newEvents(client, slog.New(slog.NewTextHandler(&log, nil)), prometheus.NewRegistry())
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { e.run(ctx); close(done) }()
			return e, func() { cancel(); <-done }
		}
		a, stopA := start()
		b, stopB := start()
		defer stopB()
		defer stopA()
		w := rules.Workload{Namespace: "ns", Name: "job", UID: "uid"}
		now := time.Date(2026, 12, 1, 12, 0, 10, 0, time.UTC)
		a.on(w, corev1.EventTypeWarning, reasonLost, strings.Repeat("x", 5000), now)
		b.on(w, corev1.EventTypeWarning, reasonLost, "the same", now.Add(3*time.Second))
		a.on(w, corev1.EventTypeNormal, reasonFound, "back", now.Add(5*time.Second))
		synctest.Wait()
		list, err := client.CoreV1().Events("ns").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(list.Items) != 2 {
			t.Errorf("%d events, want one of each kind", len(list.Items))
		}
		for _, e := range list.Items {
			if e.InvolvedObject.Kind != "StatefulSet" || string(e.InvolvedObject.UID) != "uid" || len(e.Message) > 1026 {
				t.Errorf("event %+v", e)
			}
		}

		client.PrependReactor("create", "events", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("forbidden") })
		for i := range 3 {
			a.on(w, corev1.EventTypeWarning, reasonLost, "refused", now.Add(time.Duration(i+1)*time.Hour))
		}
		synctest.Wait()
		if n := testutil.ToFloat64(a.dropped); n != 3 {
			t.Errorf("%v events counted as dropped, want 3", n)
		}
		if n := strings.Count(log.String(), "an event is not written"); n != 1 {
			t.Errorf("logged %d times:\n%s", n, &log)
		}
		full := newEvents(client, slog.New(slog.DiscardHandler), prometheus.NewRegistry()) // nobody empties its queue
		for i := range 300 {
			full.on(w, corev1.EventTypeWarning, reasonLost, "too many", now.Add(time.Duration(i)*time.Minute))
		}
		if n := testutil.ToFloat64(full.dropped); n != 300-256 {
			t.Errorf("%v of 300 events counted as dropped, want %d", n, 300-256)
		}
	})
}
