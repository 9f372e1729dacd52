package adapter

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	fakeaggregator "k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset/fake"

	"github.com/capstan-gpu/capstan/adapter/api/apitest"
	"github.com/capstan-gpu/capstan/rules"
)

// TestRun starts the whole adapter on real sockets: an exporter that answers over HTTP, an API server that knows a
// StatefulSet and its HPA, and an aggregator that asks.
func TestRun(t *testing.T) {
	begin := time.Now()
	exporter := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s := time.Since(begin).Seconds() + 100
		fmt.Fprintf(w, "process_start_time_seconds 1\ncapstan_snapshot_timestamp_seconds %f\n", s)
		for name, v := range map[string]float64{"busy": .75 * s, "observed": s} {
			fmt.Fprintf(w, "capstan_pod_gpu_%s_seconds_total{namespace=\"train\",pod=\"job-0\",pod_uid=\"p0\",shared=\"false\"} %f\n", name, v)
		}
	}))
	defer exporter.Close()
	kube, err := apitest.Start(t.TempDir(), func(r apitest.Review) bool { return r.User == "hpa" && r.Namespace == "train" && r.Verb == "list" })
	if err != nil {
		t.Fatal(err)
	}
	defer kube.Close()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	aggregator := fakeaggregator.NewClientset(&apiregistrationv1.APIService{
		ObjectMeta: metav1.ObjectMeta{Name: External},
		Spec:       apiregistrationv1.APIServiceSpec{Service: &apiregistrationv1.ServiceReference{Namespace: "capstan-system", Name: "capstan-adapter"}},
	})
	quick := rule()
	quick.Window, quick.MaxAge = 3*time.Second, 2*time.Second
	var log syncBuffer
	cfg := Config{
		Rules: []rules.Rule{quick}, Interval: time.Second,
		ExporterNamespace: "capstan-node", ExporterService: "capstan-exporter",
		Namespace: "capstan-system", Service: "capstan-adapter", Secret: "capstan-adapter-tls", ExporterSecret: "capstan-exporter-tls", ScrapeSecret: "capstan-scrape-tls", APIServices: []string{External},
		Listener: listener, Kubeconfig: kube.Kubeconfig, Client: fake.NewClientset(objects(t, exporter.URL)...), Aggregator: aggregator,
		Logger: slog.New(slog.NewTextHandler(&log, nil)), Version: "test",
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, cfg) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}()

	// The aggregator trusts what the APIService says, and nothing else.
	pool := x509.NewCertPool()
	wait(t, &log, "caBundle", func() bool {
		s, err := aggregator.ApiregistrationV1().APIServices().Get(ctx, External, metav1.GetOptions{})
		return err == nil && pool.AppendCertsFromPEM(s.Spec.CABundle)
	})
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{RootCAs: pool, ServerName: "capstan-adapter.capstan-system.svc", Certificates: []tls.Certificate{kube.Proxy}}}}
	get := func(path string) (int, string) {
		req, err := http.NewRequest(http.MethodGet, "https://"+listener.Addr().String()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Remote-User", "hpa")
		resp, err := client.Do(req)
		if err != nil {
			return 0, err.Error()
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(body)
	}
	wait(t, &log, "ready", func() bool { code, _ := get("/readyz"); return code == 200 })
	if code, body := get("/livez"); code != 200 {
		t.Errorf("/livez: %d %s", code, body)
	}
	var body string
	wait(t, &log, "a value", func() bool {
		var code int
		code, body = get("/apis/external.metrics.k8s.io/v1beta1/namespaces/train/gpu_utilization")
		return code == 200
	})
	var list struct {
		Items []struct {
			MetricLabels map[string]string
			Value        resource.Quantity
		}
	}
	if err := json.Unmarshal([]byte(body), &list); err != nil || len(list.Items) != 1 {
		t.Fatalf("%v %s", err, body)
	}
	if v := list.Items[0].Value.AsApproximateFloat64(); v < 74 || v > 76 || list.Items[0].MetricLabels["pod"] != "job-0" {
		t.Errorf("%s", body)
	}
}

func objects(t *testing.T, exporter string) []runtime.Object {
	u, err := url.Parse(exporter)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(u.Port())
	if err != nil {
		t.Fatal(err)
	}
	port, node, yes := int32(n), "node-a", true
	gpu := corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}}}}}
	return []runtime.Object{
		&discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "capstan-node", Name: "x", Labels: map[string]string{discoveryv1.LabelServiceName: "capstan-exporter"}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{u.Hostname()}, NodeName: &node}},
			Ports:       []discoveryv1.EndpointPort{{Port: &port}},
		},
		&appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "train", Name: "job", UID: "s"}, Spec: appsv1.StatefulSetSpec{Template: corev1.PodTemplateSpec{Spec: gpu}}},
		&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "train", Name: "job-0", UID: "p0", Labels: map[string]string{appsv1.StatefulSetPodNameLabel: "job-0"},
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "job", UID: "s", Controller: &yes}}},
			Spec:   gpu,
			Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(time.Now().Add(-time.Hour))}}},
		},
		&autoscalingv2.HorizontalPodAutoscaler{
			ObjectMeta: metav1.ObjectMeta{Namespace: "train", Name: "hpa"},
			Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
				ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "job"},
				Metrics:        []autoscalingv2.MetricSpec{{Type: autoscalingv2.ExternalMetricSourceType, External: &autoscalingv2.ExternalMetricSource{Metric: autoscalingv2.MetricIdentifier{Name: "gpu_utilization"}}}},
			},
		},
	}
}

func wait(t *testing.T, log fmt.Stringer, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s:\n%s", what, log)
		}
	}
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Clone(s.b.String())
}
