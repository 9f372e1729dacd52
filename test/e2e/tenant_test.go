package e2e

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net/http"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/capstan-gpu/capstan/test/rig"
)

// The path's namespace is a wall: a reader of A gets 403 for B, and who forges the front proxy's headers gets 401.
func TestTenants(t *testing.T) {
	s := begin(t)
	s.pin(60)
	s.workers("web", 1, 1)
	s.ready("web", 1)
	s.serves(time.Minute, "", each("web", 1, 60))

	_, err := cluster.Kubectl(s.ctx, "-n", s.ns, "create", "serviceaccount", "reader")
	s.must(err)
	_, err = cluster.Kubectl(s.ctx, "-n", s.ns, "create", "rolebinding", "reader", "--clusterrole=capstan-metrics-reader", "--serviceaccount="+s.ns+":reader")
	s.must(err)
	get := func(namespace string) (string, error) {
		return cluster.Kubectl(s.ctx, "get", "--raw", "/apis/external.metrics.k8s.io/v1beta1/namespaces/"+namespace+"/"+rig.Metric,
			"--as", "system:serviceaccount:"+s.ns+":reader")
	}
	s.until(30*time.Second, "the reader reads its own namespace", func(context.Context) (bool, string, error) {
		out, err := get(s.ns)
		if err != nil {
			return false, err.Error(), nil
		}
		return strings.Contains(out, `"pod":"web-0"`), out, nil
	})
	for _, other := range []string{"default", "kube-system"} {
		if out, err := get(other); err == nil || !strings.Contains(err.Error(), "orbidden") {
			t.Errorf("reading namespace %s gives %q, %v; want Forbidden", other, out, err)
		}
	}

	address := s.forward(rig.SystemNamespace, "deployment/capstan-adapter", "6443")
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} // the attacker does not care who answers
	for _, user := range []string{"system:admin", "system:kube-controller-manager"} {
		request, err := http.NewRequestWithContext(s.ctx, "GET", "https://"+address+"/apis/external.metrics.k8s.io/v1beta1/namespaces/"+s.ns+"/"+rig.Metric, nil)
		s.must(err)
		request.Header.Set("X-Remote-User", user)
		request.Header.Set("X-Remote-Group", "system:masters")
		response, err := client.Do(request)
		s.must(err)
		body, err := io.ReadAll(response.Body)
		s.must(err)
		response.Body.Close()
		if response.StatusCode != http.StatusUnauthorized || strings.Contains(string(body), "web-0") {
			t.Errorf("with a forged X-Remote-User %s the adapter answers %s %s; want 401", user, response.Status, body)
		}
	}
}

// forward opens a port of a workload of Capstan on loopback, for as long as the test lasts.
func (s *scene) forward(namespace, target, port string) (address string) {
	s.Helper()
	ctx, cancel := context.WithCancel(s.ctx)
	s.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, cluster.Status.Kubectl, "--kubeconfig", cluster.Kubeconfig, "-n", namespace, "port-forward", target, ":"+port)
	out, err := cmd.StdoutPipe()
	s.must(err)
	s.must(cmd.Start())
	s.Cleanup(func() { cancel(); _ = cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	s.must(err)
	match := regexp.MustCompile(`127\.0\.0\.1:\d+`).FindString(line)
	if match == "" {
		s.Fatalf("kubectl port-forward printed %q", line)
	}
	return match
}

// kubectl api-resources lists our group, which the library alone does not manage with aggregated discovery.
func TestDiscovery(t *testing.T) {
	s := begin(t)
	out, err := cluster.Kubectl(s.ctx, "api-resources", "--api-group=external.metrics.k8s.io", "-o", "wide")
	s.must(err)
	for _, want := range []string{rig.Metric, "external.metrics.k8s.io/v1beta1"} {
		if !strings.Contains(out, want) {
			t.Errorf("kubectl api-resources lacks %s:\n%s", want, out)
		}
	}
	bundle, err := cluster.Kubectl(s.ctx, "get", "apiservice", "v1beta1.external.metrics.k8s.io", "-o", "jsonpath={.spec.caBundle} {.spec.insecureSkipTLSVerify}")
	s.must(err)
	if ca, skip, _ := strings.Cut(bundle, " "); ca == "" || skip == "true" {
		t.Errorf("the APIService has caBundle %q and insecureSkipTLSVerify %q; want a bundle and no skipping", ca, skip)
	}
}
