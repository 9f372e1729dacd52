package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/capstan-gpu/capstan/test/rig"
)

// right is one thing that may be done: "" for a name is any, as for the verbs that have none.
type right struct{ verb, group, resource, namespace, name string }

func (r right) String() string {
	return strings.Trim(fmt.Sprintf("%s %s.%s in %q %s", r.verb, r.resource, r.group, r.namespace, r.name), " ")
}

// The adapter uses every right that our roles give it, and was never refused one; the exporter never asks the API server for anything. The
// audit log of the API server says so.
func TestRights(t *testing.T) {
	s := begin(t)
	began := time.Now()
	// What it does only when something is amiss: it mends Secrets that somebody spoiled, and tells of another owner of its APIService.
	secrets := map[string]string{"capstan-adapter-tls": rig.SystemNamespace, "capstan-exporter-tls": rig.NodeNamespace, "capstan-scrape-tls": rig.NodeNamespace}
	for name, namespace := range secrets {
		patch := `{"data":{"tls.crt":"c3BvaWxlZA=="}}`
		_, err := cluster.Clients.CoreV1().Secrets(namespace).Patch(s.ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		s.must(err)
	}
	for name, namespace := range secrets {
		s.until(time.Minute, "Secret "+name+" is mended", func(ctx context.Context) (bool, string, error) {
			secret, err := cluster.Clients.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
			return err == nil && strings.HasPrefix(string(secret.Data["tls.crt"]), "-----BEGIN"), "", err
		})
	}
	owner := func(name string) {
		_, err := cluster.Kubectl(context.WithoutCancel(s.ctx), "patch", "apiservice", "v1beta1.external.metrics.k8s.io", "--type=merge", "-p", fmt.Sprintf(`{"spec":{"service":{"name":%q}}}`, name))
		s.must(err)
	}
	owner("somebody-else")
	t.Cleanup(func() { owner("capstan-adapter") })
	s.until(time.Minute, "an event tells of the other owner", func(ctx context.Context) (bool, string, error) {
		list, err := cluster.Clients.CoreV1().Events(rig.SystemNamespace).List(ctx, metav1.ListOptions{FieldSelector: "reason=ForeignAPIService"})
		if err != nil || len(list.Items) == 0 {
			return false, "", err
		}
		return strings.Contains(list.Items[0].Message, "somebody-else"), list.Items[0].Message, nil
	})
	owner("capstan-adapter")
	s.until(time.Minute, "the API is served again", func(ctx context.Context) (bool, string, error) {
		out, err := cluster.Kubectl(ctx, "get", "apiservice", "v1beta1.external.metrics.k8s.io", "-o", `jsonpath={.status.conditions[?(@.type=="Available")].status}`)
		return out == "True", out, err
	})

	used, refused := map[right]bool{}, []string{}
	adapter := "system:serviceaccount:" + rig.SystemNamespace + ":capstan-adapter"
	exporter := "system:serviceaccount:" + rig.NodeNamespace + ":capstan-exporter"
	log, err := os.Open(cluster.Status.AuditLog)
	s.must(err)
	defer log.Close()
	lines := bufio.NewScanner(log)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e auditv1.Event
		if json.Unmarshal(lines.Bytes(), &e) != nil || e.ObjectRef == nil { // the last line may be half written
			continue
		}
		if e.User.Username == exporter {
			t.Errorf("the exporter asked the API server: %s", lines.Text())
		}
		if e.User.Username != adapter || e.ResponseStatus == nil {
			continue
		}
		r := right{e.Verb, e.ObjectRef.APIGroup, e.ObjectRef.Resource, e.ObjectRef.Namespace, e.ObjectRef.Name}
		// A namespace that is on its way out takes no event; and tests that changed which APIs are its own changed its rights, too, while the pod
		// from before still asked.
		ending := strings.Contains(e.ResponseStatus.Message, "being terminated")
		changing := e.ObjectRef.Resource == "apiservices" && e.RequestReceivedTimestamp.Time.Before(began)
		if e.ResponseStatus.Code == 403 && !ending && !changing {
			refused = append(refused, r.String())
		}
		used[r] = true
	}
	s.must(lines.Err())
	slices.Sort(refused)
	for _, r := range slices.Compact(refused) {
		t.Errorf("the adapter was refused: %s", r)
	}

	granted := func(namespace string, rules []rbacv1.PolicyRule) {
		for _, rule := range rules {
			for _, verb := range rule.Verbs {
				for _, resource := range rule.Resources {
					for _, name := range append(rule.ResourceNames, make([]string, max(0, 1-len(rule.ResourceNames)))...) {
						want := right{verb, rule.APIGroups[0], resource, namespace, name}
						if verb == "list" { // a client asks for it where the API server cannot begin a watch with what there is
							continue
						}
						if !exercised(used, want) {
							t.Errorf("granted and never used: %s", want)
						}
					}
				}
			}
		}
	}
	role, err := cluster.Clients.RbacV1().ClusterRoles().Get(s.ctx, "capstan-adapter", metav1.GetOptions{})
	s.must(err)
	granted("", role.Rules)
	for _, namespace := range []string{rig.SystemNamespace, rig.NodeNamespace} {
		role, err := cluster.Clients.RbacV1().Roles(namespace).Get(s.ctx, "capstan-adapter", metav1.GetOptions{})
		s.must(err)
		granted(namespace, role.Rules)
	}
}

// exercised says whether something was done that the right allows.
func exercised(used map[right]bool, want right) bool {
	for u := range used {
		if u.verb == want.verb && u.group == want.group && u.resource == want.resource &&
			(want.namespace == "" || u.namespace == want.namespace) && (want.name == "" || u.name == want.name) {
			return true
		}
	}
	return false
}
