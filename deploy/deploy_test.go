// Package deploy holds no program: its tests hold the manifests to what they promise.
package deploy

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"

	"github.com/capstan-gpu/capstan/adapter"
	"github.com/capstan-gpu/capstan/adapter/tls"
	"github.com/capstan-gpu/capstan/images/image"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/trainer/agent"
	"github.com/capstan-gpu/capstan/trainer/stats"
)

var update = flag.Bool("update", false, "rewrite the rendered manifests")

const (
	base      = "base"
	simulated = "overlays/simulated"
	example   = "examples/mnist-training"
	elastic   = "examples/ring"
)

const header = `# Capstan for a cluster with GPUs. Made from deploy/base by "make manifests"; do not edit.
#
#     kubectl apply --server-side -f capstan.yaml
`

func render(t *testing.T, folder string) string {
	t.Helper()
	resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), folder)
	if err != nil {
		t.Fatalf("render %s: %v", folder, err)
	}
	text, err := resources.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// with renders a folder of a copy of all manifests in which one file has this content.
func with(t *testing.T, file, content, folder string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(".")); err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(dir, file)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return render(t, filepath.Join(dir, folder))
}

// decode reads manifests as strictly as an API server that refuses unknown fields.
func decode(t *testing.T, text string) (objects []runtime.Object) {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientscheme.AddToScheme, apiregistrationv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	for _, document := range strings.Split("\n"+text, "\n---\n") {
		object, _, err := decoder.Decode([]byte(document), nil, nil)
		if err != nil {
			t.Fatalf("decode: %v\n%s", err, document)
		}
		objects = append(objects, object)
	}
	return objects
}

// only returns the objects of one type.
func only[T runtime.Object](objects []runtime.Object) (found []T) {
	for _, o := range objects {
		if o, ok := o.(T); ok {
			found = append(found, o)
		}
	}
	return found
}

// pods are the pod templates of a bundle, by the name of what makes them.
func pods(objects []runtime.Object) map[string]corev1.PodTemplateSpec {
	found := map[string]corev1.PodTemplateSpec{}
	for _, o := range objects {
		switch o := o.(type) {
		case *appsv1.Deployment:
			found[o.Name] = o.Spec.Template
		case *appsv1.DaemonSet:
			found[o.Name] = o.Spec.Template
		case *appsv1.StatefulSet:
			found[o.Name] = o.Spec.Template
		}
	}
	return found
}

func TestRendered(t *testing.T) {
	const file = "capstan.yaml"
	want := header + render(t, base)
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("%s is not what deploy/base makes; run: make manifests (-want +got):\n%s", file, diff)
	}
}

// Every field is one that the API server knows, and namespaces come before what is in them.
func TestManifests(t *testing.T) {
	for _, folder := range []string{base, simulated, example, elastic} {
		there := map[string]bool{"": true, "kube-system": true}
		for _, o := range decode(t, render(t, folder)) {
			m := o.(metav1.Object)
			if _, is := o.(*corev1.Namespace); is {
				there[m.GetName()] = true
			}
			if !there[m.GetNamespace()] {
				t.Errorf("%s: %T %s comes before its namespace %s", folder, o, m.GetName(), m.GetNamespace())
			}
		}
	}
	five, err := os.ReadFile(filepath.Join(example, "hpa-five-minutes.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	decode(t, string(five))
}

// plain is a text without comments, its words by single blanks.
func plain(text string) string {
	var words []string
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(strings.TrimSpace(line), "#") {
			words = append(words, strings.Fields(line)...)
		}
	}
	return strings.Join(words, " ")
}

// The HPA is the article's, word for word; the README shows the same.
func TestArticle(t *testing.T) {
	article, err := os.ReadFile("testdata/article.txt")
	if err != nil {
		t.Fatal(err)
	}
	const first, last = "apiVersion: autoscaling/v2", `averageValue: "80"`
	_, rest, ok := strings.Cut(string(article), first)
	middle, _, ok2 := strings.Cut(rest, last)
	if !ok || !ok2 {
		t.Fatalf("testdata/article.txt holds no manifest from %q to %q", first, last)
	}
	want := plain(first + middle + last)
	for file, fence := range map[string]string{filepath.Join(example, "hpa.yaml"): "", "../README.md": "```yaml\n"} {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		got := string(content)
		if fence != "" {
			_, got, _ = strings.Cut(got, fence)
			got, _, _ = strings.Cut(got, "```")
		}
		if got = plain(got); got != want {
			t.Errorf("%s is not the article's manifest:\n got %s\nwant %s", file, got, want)
		}
	}
}

// The five-minute variant is the article's HPA and a behavior, no more.
func TestFiveMinutes(t *testing.T) {
	read := func(name string) *autoscalingv2.HorizontalPodAutoscaler {
		content, err := os.ReadFile(filepath.Join(example, name))
		if err != nil {
			t.Fatal(err)
		}
		return decode(t, string(content))[0].(*autoscalingv2.HorizontalPodAutoscaler)
	}
	got, want := read("hpa-five-minutes.yaml"), read("hpa.yaml")
	up := got.Spec.Behavior.ScaleUp
	if *up.StabilizationWindowSeconds != 300 || !up.Tolerance.IsZero() || got.Spec.Behavior.ScaleDown != nil {
		t.Errorf("behavior %+v, want a window of 300 s and tolerance 0 for scaling up only", got.Spec.Behavior)
	}
	got.Spec.Behavior = nil
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("apart from its behavior (-article +five minutes):\n%s", diff)
	}
}

// violations are the checks of a Pod Security level that a pod does not pass.
func violations(t *testing.T, level api.Level, pod corev1.PodTemplateSpec) (reasons []string) {
	t.Helper()
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range evaluator.EvaluatePod(api.LevelVersion{Level: level, Version: api.LatestVersion()}, &pod.ObjectMeta, &pod.Spec) {
		if !r.Allowed {
			reasons = append(reasons, r.ForbiddenReason)
		}
	}
	slices.Sort(reasons)
	return reasons
}

func TestPodSecurity(t *testing.T) {
	// Of all that restricted forbids, what reads a node's folders asks for these: hostPath, and uid 0, as the kubelet's socket is root's.
	node := []string{"restricted volume types", "runAsNonRoot != true", "runAsUser=0"}
	found := pods(append(decode(t, render(t, simulated)), decode(t, render(t, example))...))
	for name, pod := range pods(decode(t, render(t, base))) {
		found[name+" (base)"] = pod
	}
	want := map[string][]string{
		"capstan-adapter": nil, "capstan-adapter (base)": nil,
		"capstan-exporter": node, "capstan-exporter (base)": node, "fakegpu": node,
		"mnist-training-worker": nil, "mnist-training-source": nil,
	}
	got := map[string][]string{}
	for name, pod := range found {
		got[name] = violations(t, api.LevelRestricted, pod)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("violations of level restricted (-want +got):\n%s", diff)
	}
	for _, ns := range only[*corev1.Namespace](append(decode(t, render(t, simulated)), decode(t, render(t, example))...)) {
		levels := map[string]string{"capstan-system": "restricted", "capstan-node": "privileged", "training": "baseline"}
		if got := ns.Labels[api.EnforceLevelLabel]; got != levels[ns.Name] {
			t.Errorf("namespace %s enforces %q, want %q", ns.Name, got, levels[ns.Name])
		}
	}
}

// What no level checks, of every container.
func TestContainers(t *testing.T) {
	seen := map[string]bool{}
	for name, pod := range pods(append(decode(t, render(t, simulated)), decode(t, render(t, example))...)) {
		if token := pod.Spec.AutomountServiceAccountToken; name != "capstan-adapter" && (token == nil || *token) {
			t.Errorf("%s gets a token of the API server, which it does not use", name)
		}
		for _, c := range pod.Spec.Containers {
			repository, _, _ := strings.Cut(strings.TrimPrefix(c.Image, image.Repository+"/"), ":")
			seen[repository] = true
			if c.Image != image.Ref(repository) || c.ImagePullPolicy != corev1.PullIfNotPresent {
				t.Errorf("%s: image %s, pulled %s; want %s:%s, pulled IfNotPresent", name, c.Image, c.ImagePullPolicy, image.Repository, image.Version)
			}
			if s := c.SecurityContext; s == nil || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem {
				t.Errorf("%s: its root file system can be written", name)
			}
			if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() || c.Resources.Limits.Memory().IsZero() {
				t.Errorf("%s: resources %+v, want requests and a limit of memory", name, c.Resources)
			}
			for _, m := range c.VolumeMounts {
				if strings.HasPrefix(m.MountPath, "/var/lib/kubelet/pod") && !m.ReadOnly {
					t.Errorf("%s may write to %s", name, m.MountPath)
				}
			}
		}
	}
	if len(seen) != 4 {
		t.Errorf("images used: %v, want the four of images/", seen)
	}
}

func TestRBAC(t *testing.T) {
	objects := decode(t, render(t, simulated))
	check := func(name string, cluster bool, rules []rbacv1.PolicyRule) {
		for _, r := range rules {
			all := slices.Concat(r.APIGroups, r.Resources, r.Verbs, r.NonResourceURLs)
			for _, bad := range []string{"*", "escalate", "bind", "impersonate", "pods/exec", "pods/attach", "pods/portforward", "nodes/proxy", "serviceaccounts/token"} {
				if slices.Contains(all, bad) {
					t.Errorf("%s grants %q: %+v", name, bad, r)
				}
			}
			named := len(r.ResourceNames) > 0
			if slices.Contains(r.Resources, "secrets") && (cluster || !named && !slices.Equal(r.Verbs, []string{"create"})) {
				t.Errorf("%s grants secrets that it does not name: %+v", name, r)
			}
			for _, verb := range r.Verbs {
				reads := slices.Contains([]string{"get", "list", "watch"}, verb)
				// An event is on an object of any namespace, and changes nothing.
				events := slices.Equal(r.Resources, []string{"events"}) && verb == "create"
				if !reads && !named && !events && (cluster || verb != "create") {
					t.Errorf("%s lets %s anything of its kind: %+v", name, verb, r)
				}
			}
		}
	}
	for _, r := range only[*rbacv1.ClusterRole](objects) {
		check(r.Name, true, r.Rules)
	}
	for _, r := range only[*rbacv1.Role](objects) {
		check(r.Namespace+"/"+r.Name, false, r.Rules)
	}
	// Nobody but the adapter is bound to anything.
	subject := func(s rbacv1.Subject) string { return fmt.Sprintf("%s %s/%s", s.Kind, s.Namespace, s.Name) }
	for _, b := range only[*rbacv1.ClusterRoleBinding](objects) {
		for _, s := range b.Subjects {
			if subject(s) != "ServiceAccount capstan-system/capstan-adapter" {
				t.Errorf("%s binds %s", b.Name, subject(s))
			}
		}
		if role := b.RoleRef.Name; role != "capstan-adapter" && role != "system:auth-delegator" {
			t.Errorf("%s binds to %s", b.Name, role)
		}
	}
	for _, b := range only[*rbacv1.RoleBinding](objects) {
		for _, s := range b.Subjects {
			if subject(s) != "ServiceAccount capstan-system/capstan-adapter" {
				t.Errorf("%s/%s binds %s", b.Namespace, b.Name, subject(s))
			}
		}
	}
}

// The caBundle is the adapter's to fill; a manifest that owned the field would take it away again.
func TestAPIService(t *testing.T) {
	services := only[*apiregistrationv1.APIService](decode(t, render(t, base)))
	if len(services) != 1 || services[0].Spec.CABundle != nil || services[0].Spec.InsecureSkipTLSVerify {
		t.Errorf("APIServices %+v, want one, without caBundle and without insecureSkipTLSVerify", services)
	}
	if text := render(t, base); strings.Contains(text, "caBundle") || strings.Contains(text, "insecureSkipTLSVerify") {
		t.Error("the bundle owns caBundle or insecureSkipTLSVerify")
	}
}

func TestWorkers(t *testing.T) {
	objects := decode(t, render(t, example))
	set := only[*appsv1.StatefulSet](objects)[0]
	if set.Spec.Replicas != nil {
		t.Errorf("replicas %d in the manifest: applying again would undo the HPA", *set.Spec.Replicas)
	}
	if set.Spec.PodManagementPolicy != appsv1.ParallelPodManagement {
		t.Errorf("pods are managed %s, want Parallel", set.Spec.PodManagementPolicy)
	}
	var headless *corev1.Service
	for _, s := range only[*corev1.Service](objects) {
		if s.Name == set.Spec.ServiceName {
			headless = s
		} else if matches(s.Spec.Selector, set.Spec.Template.Labels) {
			t.Errorf("service %s selects workers too", s.Name)
		}
	}
	if headless == nil || headless.Spec.ClusterIP != corev1.ClusterIPNone || !headless.Spec.PublishNotReadyAddresses || !matches(headless.Spec.Selector, set.Spec.Template.Labels) {
		t.Errorf("governing service %+v, want it headless, publishing those not ready, of the workers", headless)
	}
	for _, d := range only[*appsv1.Deployment](objects) {
		if matches(set.Spec.Selector.MatchLabels, d.Spec.Template.Labels) || matches(d.Spec.Selector.MatchLabels, set.Spec.Template.Labels) {
			t.Errorf("%s and the workers select each other's pods", d.Name)
		}
	}
	r := set.Spec.Template.Spec.Containers[0].Resources
	for _, name := range []corev1.ResourceName{"nvidia.com/gpu", corev1.ResourceMemory} {
		request, limit := r.Requests[name], r.Limits[name]
		if request.IsZero() || request.Cmp(limit) != 0 {
			t.Errorf("%s: requests %s, limits %s; want them equal", name, request.String(), limit.String())
		}
	}
	a := set.Spec.Template.Annotations
	if a[metricname.AnnotationStatsPort] != fmt.Sprint(set.Spec.Template.Spec.Containers[0].Ports[0].ContainerPort) || a[metricname.AnnotationStatsPath] != stats.Path {
		t.Errorf("annotations %v do not lead to the stats page", a)
	}
	hpa := only[*autoscalingv2.HorizontalPodAutoscaler](objects)[0]
	if target := hpa.Spec.ScaleTargetRef; target.Kind != "StatefulSet" || target.Name != set.Name {
		t.Errorf("the HPA scales %+v, want StatefulSet %s", target, set.Name)
	}
}

func matches(selector, labels map[string]string) bool {
	for k, v := range selector {
		if labels[k] != v {
			return false
		}
	}
	return len(selector) > 0
}

// Another namespace for the example is one line.
func TestNamespaceIsOneLine(t *testing.T) {
	file := filepath.Join(example, "kustomization.yaml")
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	changed := strings.Replace(string(content), "namespace: training\n", "namespace: elsewhere\n", 1)
	for _, o := range decode(t, with(t, file, changed, example)) {
		m := o.(metav1.Object)
		if _, is := o.(*corev1.Namespace); is && m.GetName() != "elsewhere" || !is && m.GetNamespace() != "elsewhere" {
			t.Errorf("%T %s/%s stayed where it was", o, m.GetNamespace(), m.GetName())
		}
	}
}

// The overlay in deploy/README.md takes every image from the other registry.
func TestRegistry(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, overlay, _ := strings.Cut(string(readme), "```yaml\n")
	overlay, _, _ = strings.Cut(overlay, "```")
	for _, folder := range []string{base, simulated, example} {
		got := with(t, "mine/kustomization.yaml", strings.Replace(overlay, "../base", "../"+folder, 1), "mine")
		if strings.Contains(got, image.Repository) || !strings.Contains(got, "registry.example.com/you/") {
			t.Errorf("the overlay of README.md over %s still asks for %s", folder, image.Repository)
		}
	}
}

// The simulated overlay changes the adapter's interval and rules, and nothing else of its command line.
func TestSimulatedAdapter(t *testing.T) {
	args := func(folder string) []string {
		return pods(decode(t, render(t, folder)))["capstan-adapter"].Spec.Containers[0].Args
	}
	var want []string
	for _, a := range args(base) {
		if strings.HasPrefix(a, "--interval=") {
			a = "--interval=2s"
		}
		want = append(want, a)
	}
	want = append(want, "--rules=/etc/capstan/rules.yaml")
	if diff := cmp.Diff(want, args(simulated)); diff != "" {
		t.Errorf("arguments (-want +got):\n%s", diff)
	}
}

// Each component, in an overlay over the base, does what it says to the exporter, and nothing to the adapter.
func TestComponents(t *testing.T) {
	plain := pods(decode(t, render(t, base)))
	container := func(p corev1.PodSpec) corev1.Container { return p.Containers[0] }
	has := func(p corev1.PodSpec, name, value string) bool {
		return slices.ContainsFunc(container(p).Env, func(e corev1.EnvVar) bool { return e.Name == name && strings.HasPrefix(e.Value, value) })
	}
	privileged := func(p corev1.PodSpec) bool {
		c := container(p).SecurityContext
		// The API server refuses the two together.
		return c.Privileged != nil && *c.Privileged && c.AllowPrivilegeEscalation == nil && *c.ReadOnlyRootFilesystem
	}
	components := map[string]func(p corev1.PodSpec) bool{
		"runtime-class": func(p corev1.PodSpec) bool { return p.RuntimeClassName != nil && *p.RuntimeClassName == "nvidia" },
		"mig": func(p corev1.PodSpec) bool {
			return has(p, "NVIDIA_MIG_MONITOR_DEVICES", "all") && slices.Equal(container(p).SecurityContext.Capabilities.Add, []corev1.Capability{"SYS_ADMIN"})
		},
		"processes": func(p corev1.PodSpec) bool { return p.HostPID && slices.Contains(container(p).Args, "--processes") },
		"gke": func(p corev1.PodSpec) bool {
			return has(p, "LD_LIBRARY_PATH", "/usr/local/nvidia/lib64") && privileged(p)
		},
		"driver-container": func(p corev1.PodSpec) bool { return has(p, "LD_LIBRARY_PATH", "/run/nvidia/driver") && privileged(p) },
		"plain-http": func(p corev1.PodSpec) bool {
			var want []string
			for _, a := range container(plain["capstan-exporter"].Spec).Args {
				if !strings.HasPrefix(a, "--web-config=") {
					want = append(want, a)
				}
			}
			return slices.Equal(container(p).Args, want) && len(p.Volumes) == 2 && len(container(p).VolumeMounts) == 2
		},
		"dcgm-names": func(p corev1.PodSpec) bool { return slices.Contains(container(p).Args, "--compat=dcgm") },
	}
	folders, err := os.ReadDir("components")
	const ofTheAdapter = 2 // TestAPIs
	if err != nil || len(folders) != len(components)+ofTheAdapter {
		t.Fatalf("%d components, %v; %d are tested", len(folders), err, len(components)+ofTheAdapter)
	}
	for name, does := range components {
		overlay := "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../base]\ncomponents: [../components/" + name + "]\n"
		changed := pods(decode(t, with(t, "mine/kustomization.yaml", overlay, "mine")))
		if does(plain["capstan-exporter"].Spec) || !does(changed["capstan-exporter"].Spec) {
			t.Errorf("%s does not do to the exporter what it is for", name)
		}
		if diff := cmp.Diff(plain["capstan-adapter"], changed["capstan-adapter"]); diff != "" {
			t.Errorf("%s changes the adapter:\n%s", name, diff)
		}
	}
}

// The exporters' names and the secrets are the same on all sides.
func TestCertificates(t *testing.T) {
	objects := decode(t, render(t, base))
	config := only[*corev1.ConfigMap](objects)[0].Data["web.yaml"]
	for _, want := range []string{tls.Names("capstan-adapter", "capstan-system")[0] + ", " + adapter.ScrapeName, "RequireAndVerifyClientCert"} {
		if !strings.Contains(config, want) {
			t.Errorf("the exporters' web.yaml lacks %q:\n%s", want, config)
		}
	}
	for _, s := range only[*corev1.Service](objects) {
		if p := s.Spec.Ports[0].AppProtocol; s.Name == "capstan-exporter" && (p == nil || *p != "https") {
			t.Error("the exporters' Service does not say https: the adapter would ask without TLS")
		}
	}
	for _, v := range pods(objects)["capstan-exporter"].Spec.Volumes {
		if v.Secret != nil && v.Secret.SecretName != "capstan-exporter-tls" {
			t.Errorf("the exporter mounts Secret %s", v.Secret.SecretName)
		}
	}
	var named []string
	for _, r := range only[*rbacv1.Role](objects) {
		for _, rule := range r.Rules {
			if slices.Contains(rule.Resources, "secrets") {
				named = append(named, rule.ResourceNames...)
			}
		}
	}
	if want := []string{"capstan-adapter-tls", "capstan-exporter-tls", "capstan-scrape-tls"}; !slices.Equal(named, want) {
		t.Errorf("the adapter may read and write the Secrets %q, want %q", named, want)
	}
}

// The example of a ring: its workers pass the strictest level, get a token of their own job, and have no replicas in the manifest.
func TestRingExample(t *testing.T) {
	objects := decode(t, render(t, elastic))
	set := only[*appsv1.StatefulSet](objects)[0]
	if bad := violations(t, api.LevelRestricted, set.Spec.Template); len(bad) > 0 {
		t.Errorf("violations of level restricted: %q", bad)
	}
	token := set.Spec.Template.Spec.Volumes[0].Projected.Sources[0].ServiceAccountToken
	if want := agent.Audience(set.Namespace, set.Name); token.Audience != want {
		t.Errorf("the token's audience is %s, want %s", token.Audience, want)
	}
	if mount := set.Spec.Template.Spec.Containers[0].VolumeMounts[0]; filepath.Join(mount.MountPath, token.Path) != agent.DefaultTokenFile {
		t.Errorf("the token is at %s/%s, want %s", mount.MountPath, token.Path, agent.DefaultTokenFile)
	}
	if set.Spec.Replicas != nil || set.Spec.PodManagementPolicy != appsv1.ParallelPodManagement || !only[*corev1.Service](objects)[0].Spec.PublishNotReadyAddresses {
		t.Error("want replicas left out, pods managed in parallel, addresses published before they are ready")
	}
	for _, r := range only[*rbacv1.Role](objects)[0].Rules {
		if !slices.Equal(r.Verbs, []string{"create"}) && !slices.Contains(r.Resources, "pods") && len(r.ResourceNames) == 0 {
			t.Errorf("a right on all %q: %+v", r.Resources, r)
		}
	}
}

// The components that change which APIs are the adapter's: the APIServices, what the adapter is told, and what it may patch, are the same.
func TestAPIs(t *testing.T) {
	for component, want := range map[string][]string{
		"":                     {adapter.External},
		"custom-metrics":       {adapter.CustomBeta1, adapter.External, adapter.CustomBeta2},
		"without-external-api": {adapter.CustomBeta1, adapter.CustomBeta2},
	} {
		overlay := "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../base]\n"
		if component != "" {
			overlay += "components: [../components/" + component + "]\n"
		}
		objects := decode(t, with(t, "mine/kustomization.yaml", overlay, "mine"))
		var there, told, allowed []string
		for _, s := range only[*apiregistrationv1.APIService](objects) {
			there = append(there, s.Name)
		}
		told = []string{adapter.External} // the flag's default
		for _, a := range pods(objects)["capstan-adapter"].Spec.Containers[0].Args {
			if list, ok := strings.CutPrefix(a, "--apiservices="); ok {
				told = strings.Split(list, ",")
			}
		}
		for _, r := range only[*rbacv1.ClusterRole](objects) {
			for _, rule := range r.Rules {
				if slices.Contains(rule.Resources, "apiservices") {
					allowed = append(allowed, rule.ResourceNames...)
				}
			}
		}
		for what, got := range map[string][]string{"APIServices": there, "the adapter's flag": told, "what it may patch": allowed} {
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("component %q: %s: %q, want %q", component, what, got, want)
			}
		}
	}
}

// The simulated overlay's rules are the shipped ones with other times, and people may read every shipped metric.
func TestRules(t *testing.T) {
	shipped := map[string]rules.Rule{}
	for _, r := range rules.Default() {
		shipped[r.Metric] = r
	}
	if len(shipped) == 0 {
		t.Skip("package rules ships no rules yet")
	}
	file := filepath.Join(simulated, "rules.yaml")
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	short, err := rules.Parse(file, content)
	if err != nil {
		t.Fatal(err)
	}
	for _, got := range short {
		want := shipped[got.Metric]
		if want.Window < got.Window || want.MaxAge < got.MaxAge || want.HoldFor < got.HoldFor || want.JoinFor < got.JoinFor {
			t.Errorf("%s: %+v waits longer than the shipped %+v", got.Metric, got, want)
		}
		want.Window, want.MaxAge, want.HoldFor, want.JoinFor = got.Window, got.MaxAge, got.HoldFor, got.JoinFor
		want.Help = got.Help
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s, apart from its times (-shipped +%s):\n%s", got.Metric, file, diff)
		}
	}
	var readable []string
	for _, r := range only[*rbacv1.ClusterRole](decode(t, render(t, base))) {
		if r.Name == "capstan-metrics-reader" {
			readable = r.Rules[0].Resources
		}
	}
	for metric := range shipped {
		if !slices.Contains(readable, metric) {
			t.Errorf("ClusterRole capstan-metrics-reader lets nobody read %s", metric)
		}
	}
}
