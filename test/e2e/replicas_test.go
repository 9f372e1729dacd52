package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/test/rig"
)

// An exporter's page is for the adapter and for who has the certificate that the adapter made for others: nobody reads it without one.
func TestExporterWantsCertificate(t *testing.T) {
	s := begin(t)
	pod, err := cluster.PodOn(s.ctx, rig.NodeNamespace, "app.kubernetes.io/name=capstan-exporter", s.nodes()[0])
	s.must(err)
	secret, err := cluster.Clients.CoreV1().Secrets(rig.NodeNamespace).Get(s.ctx, "capstan-scrape-tls", metav1.GetOptions{})
	s.must(err)
	if _, leaked := secret.Data["ca.key"]; leaked {
		t.Error("Secret capstan-scrape-tls holds the CA's key")
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(secret.Data["ca.crt"])
	get := func(scheme string, certificates ...tls.Certificate) (int, string, error) {
		client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
			TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "capstan-exporter.capstan-node.svc", Certificates: certificates}}}
		address := s.forward(rig.NodeNamespace, "pod/"+pod.Name, "9401") // one for each: it ends with a connection that the exporter cuts
		response, err := client.Get(scheme + "://" + address + "/metrics")
		if err != nil {
			return 0, "", err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		return response.StatusCode, string(body), err
	}
	if code, _, err := get("https"); err == nil {
		t.Errorf("without a certificate: status %d, want no answer", code)
	}
	if code, _, err := get("http"); err != nil || code != http.StatusBadRequest {
		t.Errorf("without TLS: status %d, %v; want 400", code, err)
	}
	pair, err := tls.X509KeyPair(secret.Data["tls.crt"], secret.Data["tls.key"])
	s.must(err)
	if code, body, err := get("https", pair); err != nil || code != 200 || !strings.Contains(body, metricname.GPUInfo+"{") {
		t.Errorf("with the certificate for scrapes: status %d, %v", code, err)
	}
	// The exporters' own is no client's.
	own, err := cluster.Clients.CoreV1().Secrets(rig.NodeNamespace).Get(s.ctx, "capstan-exporter-tls", metav1.GetOptions{})
	s.must(err)
	pair, err = tls.X509KeyPair(own.Data["tls.crt"], own.Data["tls.key"])
	s.must(err)
	if code, _, err := get("https", pair); err == nil {
		t.Errorf("with the exporters' certificate: status %d, want no answer", code)
	}
}

// asked is what became of requests, ten a second.
type asked struct {
	mu     sync.Mutex
	total  int
	failed []string      // texts of the errors
	gap    time.Duration // the longest time without an answer
}

// ask asks for a workload's values until the function that it returns is called.
func (s *scene) ask() (stop func() *asked) {
	ctx, cancel := context.WithCancel(s.ctx)
	result := &asked{}
	var wait sync.WaitGroup
	wait.Go(func() {
		ticker := time.NewTicker(100 * time.Millisecond)
		defer ticker.Stop()
		answered := time.Now()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			wait.Go(func() {
				asking, cancel := context.WithTimeout(ctx, 10*time.Second)
				defer cancel()
				_, err := cluster.External(asking, s.ns, rig.Metric, "")
				if ctx.Err() != nil {
					return
				}
				result.mu.Lock()
				defer result.mu.Unlock()
				result.total++
				if err != nil {
					result.failed = append(result.failed, err.Error())
				} else {
					answered = time.Now()
				}
				result.gap = max(result.gap, time.Since(answered))
			})
		}
	})
	return func() *asked { cancel(); wait.Wait(); return result }
}

// The adapter is rolled out anew under ten requests a second, and none of them goes without an answer. Then one of its two pods is killed:
// the API server finds the other one, and nothing is resized.
func TestReplicas(t *testing.T) {
	s := begin(t)
	s.spread("web")
	floor := s.watchFloor("web")
	stop := s.ask()
	_, err := cluster.Kubectl(s.ctx, "-n", rig.SystemNamespace, "rollout", "restart", "deployment/capstan-adapter")
	s.must(err)
	s.must(cluster.Ready(s.ctx, rig.SystemNamespace, "deployment/capstan-adapter", 3*time.Minute))
	rolled := stop()
	t.Logf("rolled out anew: %d requests, %d failed", rolled.total, len(rolled.failed))
	if len(rolled.failed) > 0 || rolled.total < 100 {
		t.Errorf("while it was rolled out, %d of %d requests failed, such as: %s", len(rolled.failed), rolled.total, strings.Join(rolled.failed[:min(3, len(rolled.failed))], "\n"))
	}

	pods := s.adapterPods() // one of those that the roll-out ended would be no loss
	nodes := map[string]bool{}
	for _, p := range pods {
		nodes[p.Spec.NodeName] = true
	}
	stop = s.ask()
	_, err = cluster.Kubectl(s.ctx, "-n", rig.SystemNamespace, "delete", "pod", pods[0].Name, "--grace-period=0", "--force")
	s.must(err)
	time.Sleep(20 * time.Second)
	killed := stop()
	t.Logf("one of %d pods on %d nodes killed: %d requests, %d failed, at most %s without an answer", len(pods), len(nodes), killed.total, len(killed.failed), killed.gap.Round(10*time.Millisecond))
	if killed.gap > 5*time.Second {
		t.Errorf("%s without an answer after a replica was killed, want at most 5s: %s", killed.gap, strings.Join(killed.failed[:min(3, len(killed.failed))], "\n"))
	}
	s.must(cluster.Ready(s.ctx, rig.SystemNamespace, "deployment/capstan-adapter", 3*time.Minute))
	s.condition("web", time.Minute, corev1.ConditionTrue)
	if replicas, value := floor(); replicas < 2 || value < 90 {
		t.Errorf("smallest size %d, smallest value %.1f; want never below 2 and 90", replicas, value)
	}
	if want := min(2, len(s.nodes())); len(nodes) < want {
		t.Errorf("both pods are on %s", fmt.Sprint(nodes))
	}
}
