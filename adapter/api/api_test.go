package api_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"

	"github.com/capstan-gpu/capstan/adapter/api"
	"github.com/capstan-gpu/capstan/adapter/api/apitest"
	capstantls "github.com/capstan-gpu/capstan/adapter/tls"
	"github.com/capstan-gpu/capstan/adapter/workloads"
	"github.com/capstan-gpu/capstan/rules"
)

var at = time.Now().Truncate(time.Second)

// table: in namespace a, job has two workers and sick is in error; in namespace b one more job.
func table() *workloads.Table {
	list := []rules.Rule{{Metric: "gpu_utilization", Window: time.Minute, Per: rules.PerPod}}
	view := workloads.Build(
		[]workloads.HPA{{Namespace: "a", Name: "hpa", TargetKind: "StatefulSet", TargetName: "job", Asks: []workloads.Ask{{Metric: "gpu_utilization"}}}},
		[]workloads.StatefulSet{{Namespace: "a", Name: "job", UID: "j", GPUs: 1}, {Namespace: "a", Name: "sick", UID: "s", GPUs: 1}, {Namespace: "b", Name: "secret", UID: "b", GPUs: 1}},
		[]workloads.Pod{podOf("a", "j", "job-0", "0"), podOf("a", "j", "job-1", "1"), podOf("a", "s", "sick-0", "2"), podOf("a", "s", "sick-1", "3"), podOf("b", "b", "secret-0", "4")},
		[]string{"gpu_utilization"})
	fresh := rules.Item{Pod: "job-0", PodUID: "0", Workload: "job", Node: "n/1", Value: 94.9996, At: at, Labels: map[string]string{"gpu_model": "NVIDIA H200"}}
	answers := [][]rules.Answer{{
		{Items: []rules.Item{
			fresh,
			{Pod: "job-1", PodUID: "1", Workload: "job", Node: "n/2", Value: 0, At: at, Held: true},
		}, Fresh: []rules.Item{fresh}},
		{Err: errors.New("pod sick-0 is missing for 62s"), Fresh: []rules.Item{{Pod: "sick-1", PodUID: "3", Workload: "sick", Value: 12, At: at}}},
		{Items: []rules.Item{{Pod: "secret-0", PodUID: "4", Workload: "secret", Value: 1, At: at}}, Fresh: []rules.Item{{Pod: "secret-0", PodUID: "4", Workload: "secret", Value: 1, At: at}}},
	}}
	return workloads.NewTable(time.Now(), view, list, answers, func(rules.Pod) string { return "" })
}

func podOf(namespace, owner, name, uid string) workloads.Pod {
	app, _, _ := strings.Cut(name, "-")
	return workloads.Pod{Namespace: namespace, Owner: owner, Labels: workloads.LabelsOf(map[string]string{"app": app, "team": "x"}), Pod: rules.Pod{UID: uid, Name: name, GPUs: 1}}
}

// source is what a loop of ticks is to the provider.
type source struct {
	list  []rules.Rule
	table func() *workloads.Table
}

func (s source) Table() *workloads.Table { return s.table() }
func (s source) Rules() []rules.Rule     { return s.list }
func (s source) Ask(string)              {}

func start(t *testing.T, current func() *workloads.Table) (*apitest.API, string, *x509.CertPool) {
	kube, err := apitest.Start(t.TempDir(), func(r apitest.Review) bool {
		return r.User == "alice" && r.Namespace == "a" && (r.Verb == "list" || r.Verb == "get") || r.User == "prometheus" && r.Path == "/metrics" ||
			r.User == "alice" && strings.HasPrefix(r.Path, "/apis")
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kube.Close)

	policy, purpose := capstantls.Policy{CAValidity: time.Hour, CertValidity: time.Hour},
		capstantls.Purpose{Names: capstantls.Names("capstan-adapter", "capstan-system"), Usages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	var m capstantls.Material
	for _, a := range []capstantls.Action{capstantls.NewCA, capstantls.NewCert} {
		if m, err = m.Do(a, purpose, policy, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	data, err := m.Data()
	if err != nil {
		t.Fatal(err)
	}
	cert, err := dynamiccertificates.NewStaticCertKeyContent("test", data["tls.crt"], data["tls.key"])
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "capstan_adapter_test", Help: "Test."}))
	list := []rules.Rule{{Metric: "gpu_utilization", Window: time.Minute, Per: rules.PerPod}}
	server, err := api.New(api.Config{
		Provider: api.NewProvider(source{list, current}, time.Minute), Cert: cert, Listener: listener, Kubeconfig: kube.Kubeconfig, Gatherer: registry,
		Ready: []api.Check{{Name: "apiservice", Err: func() error { return errors.New("it belongs to keda") }}},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(m.Bundle())
	return kube, "https://" + server.Address(), pool
}

// asker asks as somebody; with the front proxy's certificate, headers are believed.
type asker struct {
	base   string
	client *http.Client
	header http.Header
}

func (a asker) get(t *testing.T, path string, accept ...string) (int, string, http.Header) {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, a.base+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header = a.header.Clone()
	if len(accept) > 0 {
		req.Header.Set("Accept", accept[0])
	}
	resp, err := a.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body), resp.Header
}

func client(pool *x509.CertPool, certs ...tls.Certificate) *http.Client {
	return &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "capstan-adapter.capstan-system.svc", Certificates: certs}}}
}

const gpu = "/apis/external.metrics.k8s.io/v1beta1/namespaces/a/gpu_utilization"

// TestServer asks the real server everything over one connection or two: starting one costs more than all of it.
func TestServer(t *testing.T) {
	kube, base, pool := start(t, table)
	proxied := asker{base, client(pool, kube.Proxy), http.Header{"X-Remote-User": {"alice"}, "X-Remote-Group": {"system:authenticated"}}}
	direct := asker{base, client(pool), http.Header{}}
	// The front proxy's CA is read by an informer, after the start.
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if code, body, _ := proxied.get(t, gpu); code == 200 {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("%d %s", code, body)
		}
		proxied.client.CloseIdleConnections()
	}

	t.Run("items", func(t *testing.T) {
		code, body, _ := proxied.get(t, gpu)
		if code != 200 {
			t.Fatalf("%d %s", code, body)
		}
		var got any
		if err := json.Unmarshal([]byte(body), &got); err != nil {
			t.Fatal(err)
		}
		stamp := at.UTC().Format(time.RFC3339)
		item := func(value string, labels map[string]any) any {
			return map[string]any{"metricName": "gpu_utilization", "metricLabels": labels, "timestamp": stamp, "window": 60.0, "value": value}
		}
		want := map[string]any{
			"kind": "ExternalMetricValueList", "apiVersion": "external.metrics.k8s.io/v1beta1", "metadata": map[string]any{},
			"items": []any{
				item("95", map[string]any{"pod": "job-0", "workload": "job", "node": "n-1", "gpu_model": "NVIDIA-H200", "held": "false"}),
				item("0", map[string]any{"pod": "job-1", "workload": "job", "node": "n-2", "held": "true"}),
			},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
	})
	t.Run("protobuf", func(t *testing.T) { // what the HPA controller asks for
		code, body, header := proxied.get(t, gpu, "application/vnd.kubernetes.protobuf, */*")
		if code != 200 || header.Get("Content-Type") != "application/vnd.kubernetes.protobuf" || !strings.HasPrefix(body, "k8s\x00") {
			t.Errorf("%d %s %.20q", code, header.Get("Content-Type"), body)
		}
	})

	f := func(what, path string, wantCode int, wantText string) {
		t.Helper()
		code, body, header := proxied.get(t, path)
		if code != wantCode || !strings.Contains(body, wantText) {
			t.Errorf("%s: %d %s; want %d with %q", what, code, body, wantCode, wantText)
		}
		if strings.Contains(body, "secret") {
			t.Errorf("%s: an answer about namespace a names what is in b: %s", what, body)
		}
		if header.Get("Retry-After") != "" {
			t.Errorf("%s: carries Retry-After", what)
		}
		var status struct{ Kind, Status, Message string }
		if err := json.Unmarshal([]byte(body), &status); err != nil || wantCode != 200 && (status.Kind != "Status" || status.Message == "") {
			t.Errorf("%s: is no Status: %s", what, body)
		}
	}
	selector := func(s string) string { return gpu + "?labelSelector=" + url.QueryEscape(s) }
	f("mixed case", strings.Replace(gpu, "gpu_utilization", "GPU_Utilization", 1), 200, `"metricName":"gpu_utilization"`)
	f("a workload in error", selector("workload=sick"), 503, "StatefulSet sick: pod sick-0 is missing for 62s")
	f("a selector over both", selector("workload in (job,sick)"), 503, "pod sick-0 is missing")
	f("one pod", selector("pod=job-1"), 200, `"value":"0"`)
	f("fresh ones", selector("held!=true,workload=job"), 200, `"value":"95"`)
	f("nobody", selector("workload=gone"), 404, "the workloads of this namespace: job, sick")
	f("a namespace in the selector", selector("namespace=b"), 404, "selects no worker")
	f("a bad selector", selector("workload in ("), 400, "")
	f("an unknown metric", strings.Replace(gpu, "gpu_utilization", "gpu_utilisation", 1), 404, "there are gpu_utilization")
	f("another namespace", strings.Replace(gpu, "/a/", "/b/", 1), 403, "alice")
	f("all namespaces", "/apis/external.metrics.k8s.io/v1beta1/gpu_utilization", 403, "")
	f("the group", "/apis/external.metrics.k8s.io/v1beta1", 200, `"name":"gpu_utilization"`)

	// The same values by pod, as an HPA with a metric of type Pods asks: with the labels of its target's pods. Missing ones are left out.
	for _, version := range []string{"v1beta1", "v1beta2"} {
		pods := func(which, selector string) string {
			return "/apis/custom.metrics.k8s.io/" + version + "/namespaces/a/pods/" + which + "/gpu_utilization?labelSelector=" + url.QueryEscape(selector)
		}
		f("pods of a workload, "+version, pods("*", "app=job"), 200, `"name":"job-0"`)
		f("of one in error, "+version, pods("*", "app=sick"), 200, `"name":"sick-1"`)
		f("of both, "+version, pods("*", "team=x,app in (job,sick)"), 200, `"value":"12"`)
		f("nobody, "+version, pods("*", "app=gone"), 404, "selects no pod")
		f("only missing ones, "+version, pods("*", "apps.kubernetes.io/pod-index=1,app=job"), 503, "job-1")
		f("one by name, "+version, pods("job-0", ""), 200, `"value":"95"`)
		f("one without a value, "+version, pods("sick-0", ""), 503, "pod sick-0 is missing for 62s")
		f("one of another namespace, "+version, pods("other-0", ""), 404, "")
		f("an unknown metric, "+version, strings.Replace(pods("*", ""), "gpu_utilization", "busy", 1), 404, "there are gpu_utilization")
		f("other objects, "+version, strings.Replace(pods("*", ""), "/pods/", "/jobs.batch/", 1), 404, "metrics of pods of a namespace only, not of jobs.batch")
		f("the group, "+version, "/apis/custom.metrics.k8s.io/"+version, 200, `"name":"pods/gpu_utilization"`)
	}

	t.Run("who asks", func(t *testing.T) {
		f := func(a asker, want int) {
			t.Helper()
			if code, body, _ := a.get(t, gpu); code != want {
				t.Errorf("%v: %d %s, want %d", a.header, code, body, want)
			}
		}
		f(direct, 401)
		f(asker{base, direct.client, http.Header{"X-Remote-User": {"system:admin"}, "X-Remote-Group": {"system:masters"}}}, 401)
		f(asker{base, direct.client, http.Header{"Authorization": {"Bearer token-alice"}}}, 200)
		f(asker{base, direct.client, http.Header{"Authorization": {"Bearer token-bob"}}}, 403)
		f(asker{base, direct.client, http.Header{"Authorization": {"Bearer nonsense"}}}, 401)
	})
	t.Run("aggregated discovery", func(t *testing.T) {
		code, body, _ := proxied.get(t, "/apis", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList")
		if code != 200 || !strings.Contains(body, `"resource":"gpu_utilization"`) || strings.Count(body, `"resource":"pods/gpu_utilization"`) != 2 || !strings.Contains(body, `"freshness":"Current"`) {
			t.Errorf("%d %s", code, body)
		}
	})
	t.Run("metrics", func(t *testing.T) {
		if code, _, _ := direct.get(t, "/metrics"); code != 401 {
			t.Errorf("without credentials: %d", code)
		}
		prometheus := asker{base, direct.client, http.Header{"Authorization": {"Bearer token-prometheus"}}}
		code, body, _ := prometheus.get(t, "/metrics")
		if code != 200 || !strings.Contains(body, "capstan_adapter_test 0") || !strings.Contains(body, "apiserver_request_total") {
			t.Errorf("%d, %d bytes", code, len(body))
		}
	})
	t.Run("probes", func(t *testing.T) {
		if code, body, _ := direct.get(t, "/readyz"); code != 500 || !strings.Contains(body, "[-]apiservice failed") {
			t.Errorf("/readyz: %d %s", code, body)
		}
		if code, body, _ := direct.get(t, "/readyz/apiservice"); code != 500 || !strings.Contains(body, "keda") {
			t.Errorf("/readyz/apiservice: %d %s", code, body)
		}
		alice := asker{base, direct.client, http.Header{"Authorization": {"Bearer token-alice"}}}
		if code, _, _ := alice.get(t, "/debug/pprof/"); code == 200 {
			t.Error("profiling is on")
		}
	})
	t.Run("openapi", func(t *testing.T) {
		if code, body, _ := proxied.get(t, "/openapi/v3"); code != 403 { // alice may only /apis; that it is there is what the next line says
			t.Errorf("%d %s", code, body)
		}
		admin := asker{base, proxied.client, http.Header{"X-Remote-User": {"admin"}, "X-Remote-Group": {"system:masters"}}}
		if code, body, _ := admin.get(t, "/openapi/v3"); code != 200 || !strings.Contains(body, "apis/external.metrics.k8s.io/v1beta1") {
			t.Errorf("%d %s", code, body)
		}
	})
}
