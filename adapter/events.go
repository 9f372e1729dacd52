package adapter

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/capstan-gpu/capstan/rules"
)

// Reasons of events on a StatefulSet whose HPA asks for a metric.
const (
	reasonLost  = "MetricLost"  // the HPA gets an error, and holds the size
	reasonFound = "MetricFound" // it gets values (again)
)

// events writes Kubernetes events on workloads. A tick does not wait for the API server: what does not fit the queue is counted and left
// out, for an event is only for people.
type events struct {
	client  kubernetes.Interface
	log     *slog.Logger
	queue   chan *corev1.Event
	dropped prometheus.Counter
}

func newEvents(client kubernetes.Interface, log *slog.Logger, r prometheus.Registerer) *events {
	e := &events{client: client, log: log, queue: make(chan *corev1.Event, 256),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{Name: "capstan_adapter_events_dropped_total", Help: "Events on workloads that were not written: the API server did not keep up or refused them."})}
	r.MustRegister(e.dropped)
	return e
}

// on queues an event on a workload.
func (e *events) on(w rules.Workload, kind, reason, text string, now time.Time) {
	e.add(corev1.ObjectReference{APIVersion: "apps/v1", Kind: "StatefulSet", Namespace: w.Namespace, Name: w.Name, UID: types.UID(w.UID)}, kind, reason, text, now)
}

// onPod queues an event on the adapter's own pod, if it has one.
func (e *events) onPod(namespace, name, kind, reason, text string, now time.Time) {
	if name != "" {
		e.add(corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: namespace, Name: name}, kind, reason, text, now)
	}
}

func (e *events) add(about corev1.ObjectReference, kind, reason, text string, now time.Time) {
	select {
	case e.queue <- eventOn(about, kind, reason, text, now):
	default:
		e.dropped.Inc()
	}
}

// eventOn is an event. Replicas that see the same within a minute give it the same name, so that it is there once.
func eventOn(about corev1.ObjectReference, kind, reason, text string, now time.Time) *corev1.Event {
	const most = 1024 // bytes of a message
	if len(text) > most {
		text = text[:most-1] + "…"
	}
	at := metav1.NewTime(now)
	minute := now.Truncate(time.Minute).Unix()
	return &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: about.Namespace, Name: fmt.Sprintf("%s.%x", about.Name, xxhash.Sum64String(fmt.Sprint(about.UID, reason, minute)))},
		InvolvedObject: about,
		Type:           kind, Reason: reason, Message: text,
		FirstTimestamp: at, LastTimestamp: at, Count: 1,
		Source: corev1.EventSource{Component: "capstan-adapter"}, ReportingController: "capstan.dev/adapter",
	}
}

// run writes what is queued until ctx is done.
func (e *events) run(ctx context.Context) {
	failed := false
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-e.queue:
			_, err := e.client.CoreV1().Events(event.Namespace).Create(ctx, event, metav1.CreateOptions{})
			if ctx.Err() != nil || apierrors.IsAlreadyExists(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
				continue
			}
			if err != nil {
				e.dropped.Inc()
				if !failed {
					e.log.Warn("an event is not written; more such are only counted", "workload", event.Namespace+"/"+event.InvolvedObject.Name, "err", err)
				}
			}
			failed = err != nil
		}
	}
}
