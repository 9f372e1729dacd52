// Package api serves external.metrics.k8s.io/v1beta1 and custom.metrics.k8s.io/v1beta1 and v1beta2 to the API server's aggregation layer.
//
// It does no work for a request: [Provider] looks up what the newest tick found. The custom metrics are the same values, by pod. Who asks is known from the front proxy's
// certificate or a token, whether they may from a SubjectAccessReview; a request without either is refused, whatever
// names its headers carry. No answer carries Retry-After.
//
// It wraps custom-metrics-apiserver, around the parts of it that do not fit: command-line flags, a RESTMapper, a
// self-signed certificate, and the missing entry in aggregated discovery, without which `kubectl api-resources` shows
// nothing.
package api

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	endpointmetrics "k8s.io/apiserver/pkg/endpoints/metrics"
	openapinamer "k8s.io/apiserver/pkg/endpoints/openapi"
	"k8s.io/apiserver/pkg/endpoints/responsewriter"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/apiserver/pkg/server/healthz"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/component-base/metrics/legacyregistry"
	openapicommon "k8s.io/kube-openapi/pkg/common"
	"k8s.io/metrics/pkg/apis/custom_metrics"
	"k8s.io/metrics/pkg/apis/external_metrics"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/apiserver"
	metricsapi "sigs.k8s.io/custom-metrics-apiserver/pkg/apiserver/metrics"
	generatedcore "sigs.k8s.io/custom-metrics-apiserver/pkg/generated/openapi/core"
	generatedcustom "sigs.k8s.io/custom-metrics-apiserver/pkg/generated/openapi/custommetrics"
	generatedexternal "sigs.k8s.io/custom-metrics-apiserver/pkg/generated/openapi/externalmetrics"
)

// Check is a health check: a name for the path, such as /readyz/NAME, and what is wrong.
type Check struct {
	Name string
	Err  func() error
}

// Config of a Server.
type Config struct {
	Provider   *Provider                                  // required
	Cert       dynamiccertificates.CertKeyContentProvider // required; must have a certificate already
	Port       int                                        // of all interfaces
	Listener   net.Listener                               // instead of Port
	Kubeconfig string                                     // where to ask who somebody is and what they may; "" = in-cluster

	Live, Ready []Check // besides the library's own
	// ShutdownDelay is how long it goes on serving after it was told to stop, no longer ready, so that nobody is turned away.
	ShutdownDelay time.Duration
	Gatherer      prometheus.Gatherer // added to the library's on /metrics; nil = none
}

// Server is the API server.
type Server struct {
	generic  *genericapiserver.GenericAPIServer
	provider *Provider
}

var registerLibraryMetrics = sync.OnceValue(func() error {
	endpointmetrics.Register()
	return metricsapi.RegisterMetrics(legacyregistry.Register)
})

// New makes a Server. It opens the port, reads the front proxy's CA from the API server, and fails if that cannot be read;
// it serves only in Run.
func New(cfg Config) (*Server, error) {
	if err := registerLibraryMetrics(); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	config := genericapiserver.NewConfig(apiserver.Codecs)
	config.EnableProfiling = false
	config.EnableContentionProfiling = false
	config.EnableMetrics = false // ours below
	config.ShutdownDelayDuration = cfg.ShutdownDelay
	config.RequestTimeout = 10 * time.Second
	// A look-up needs no limit, and the library's answers 429 with Retry-After.
	config.MaxRequestsInFlight, config.MaxMutatingRequestsInFlight = 0, 0
	config.BuildHandlerChainFunc = func(handler http.Handler, c *genericapiserver.Config) http.Handler {
		return withoutRetryAfter(genericapiserver.DefaultBuildHandlerChain(handler, c))
	}
	definitions := func(ref openapicommon.ReferenceCallback) map[string]openapicommon.OpenAPIDefinition {
		all := generatedcore.GetOpenAPIDefinitions(ref)
		maps.Copy(all, generatedexternal.GetOpenAPIDefinitions(ref))
		maps.Copy(all, generatedcustom.GetOpenAPIDefinitions(ref))
		// Pods and all the rest of core/v1 are no part of this API, and would stay in memory; but for what a custom metric describes.
		maps.DeleteFunc(all, func(name string, _ openapicommon.OpenAPIDefinition) bool {
			return strings.HasPrefix(name, "io.k8s.api.core.") && name != "io.k8s.api.core.v1.ObjectReference"
		})
		return all
	}
	namer := openapinamer.NewDefinitionNamer(apiserver.Scheme)
	config.OpenAPIConfig = genericapiserver.DefaultOpenAPIConfig(definitions, namer)
	config.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(definitions, namer)
	config.OpenAPIConfig.Info.Title, config.OpenAPIConfig.Info.Version = "capstan-adapter", "v1beta1"
	config.OpenAPIV3Config.Info.Title, config.OpenAPIV3Config.Info.Version = "capstan-adapter", "v1beta1"

	serving := genericoptions.NewSecureServingOptions()
	serving.BindPort = cfg.Port
	serving.Listener = cfg.Listener
	serving.ServerCert = genericoptions.GeneratableKeyCert{GeneratedCert: cfg.Cert}
	serving.MinTLSVersion = "VersionTLS13"
	if err := serving.WithLoopback().ApplyTo(&config.SecureServing, &config.LoopbackClientConfig); err != nil {
		return nil, fmt.Errorf("serve: %w", err)
	}
	authentication := genericoptions.NewDelegatingAuthenticationOptions()
	authentication.RemoteKubeConfigFile = cfg.Kubeconfig
	if err := authentication.ApplyTo(&config.Authentication, config.SecureServing, nil); err != nil {
		return nil, fmt.Errorf("authentication: %w", err)
	}
	config.Authentication.Authenticator = probesOnly(config.Authentication.Authenticator)
	authorization := genericoptions.NewDelegatingAuthorizationOptions().WithAlwaysAllowPaths("/readyz/*", "/livez/*")
	authorization.RemoteKubeConfigFile = cfg.Kubeconfig
	// The HPA controller asks for each HPA once in 15 s; with the library's 10 s, none of its requests would find an answer.
	authorization.AllowCacheTTL = time.Minute
	if err := authorization.ApplyTo(&config.Authorization); err != nil {
		return nil, fmt.Errorf("authorization: %w", err)
	}

	server, err := (&apiserver.Config{GenericConfig: config}).Complete(nil).New("capstan-adapter", podProvider{cfg.Provider}, cfg.Provider)
	if err != nil {
		return nil, err
	}
	generic := server.GenericAPIServer
	served := &Server{generic, cfg.Provider}
	served.Announce()
	// Until the front proxy's CA is known, its certificate is not even asked for, and a connection that it keeps would be
	// refused for as long as it lasts. No one should connect before.
	frontProxy := Check{"front-proxy", func() error {
		if h := config.Authentication.RequestHeaderConfig; h != nil {
			if _, known := h.CAContentProvider.VerifyOptions(); known {
				return nil
			}
		}
		return errors.New("the front proxy's CA is not known yet")
	}}
	ready := append([]Check{frontProxy}, cfg.Ready...)
	if err := errors.Join(generic.AddLivezChecks(0, checks(cfg.Live)...), generic.AddReadyzChecks(checks(ready)...)); err != nil {
		return nil, err
	}
	gatherers := prometheus.Gatherers{legacyregistry.DefaultGatherer}
	if cfg.Gatherer != nil {
		gatherers = append(gatherers, cfg.Gatherer)
	}
	generic.Handler.NonGoRestfulMux.Handle("/metrics", promhttp.HandlerFor(gatherers, promhttp.HandlerOpts{}))
	return served, nil
}

// Run serves until ctx is done, then for ShutdownDelay more, and returns when all requests are answered.
func (s *Server) Run(ctx context.Context) error {
	return s.generic.PrepareRun().RunWithContext(ctx)
}

// Announce puts the metrics that there are now into the aggregated discovery document; the unaggregated one is made for each request.
func (s *Server) Announce() {
	var external, custom []string
	for _, m := range s.provider.ListAllExternalMetrics() {
		external = append(external, m.Metric)
	}
	for _, m := range (podProvider{s.provider}).ListAllMetrics() {
		custom = append(custom, m.GroupResource.String()+"/"+m.Metric)
	}
	document := s.generic.AggregatedDiscoveryGroupManager
	document.AddGroupVersion(external_metrics.GroupName, discovery(external_metrics.GroupName, "v1beta1", "ExternalMetricValueList", external))
	for _, version := range []string{"v1beta1", "v1beta2"} {
		document.AddGroupVersion(custom_metrics.GroupName, discovery(custom_metrics.GroupName, version, "MetricValueList", custom))
	}
}

// discovery is a version's entry in the aggregated discovery document. The verb is what the library says in the unaggregated one: tools
// that list all there is by verb "list" would otherwise try to.
func discovery(group, version, kind string, resources []string) apidiscoveryv2.APIVersionDiscovery {
	out := apidiscoveryv2.APIVersionDiscovery{Version: version, Freshness: apidiscoveryv2.DiscoveryFreshnessCurrent}
	for _, resource := range resources {
		out.Resources = append(out.Resources, apidiscoveryv2.APIResourceDiscovery{
			Resource:     resource,
			ResponseKind: &metav1.GroupVersionKind{Group: group, Version: version, Kind: kind},
			Scope:        apidiscoveryv2.ScopeNamespace,
			Verbs:        []string{"get"},
		})
	}
	return out
}

func checks(list []Check) []healthz.HealthChecker {
	var out []healthz.HealthChecker
	for _, c := range list {
		out = append(out, healthz.NamedCheck(c.Name, func(*http.Request) error { return c.Err() }))
	}
	return out
}

// probesOnly refuses requests without credentials with 401, but for the kubelet's probes. The library makes them those of
// system:anonymous everywhere, and a forged X-Remote-User would get as far as a review of what that user may.
func probesOnly(inner authenticator.Request) authenticator.Request {
	return authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		resp, ok, err := inner.AuthenticateRequest(req)
		if err != nil || !ok || resp.User.GetName() != user.Anonymous {
			return resp, ok, err
		}
		first, _, _ := strings.Cut(strings.TrimPrefix(req.URL.Path, "/"), "/")
		switch first {
		case "healthz", "livez", "readyz":
			return resp, true, nil
		}
		return nil, false, nil
	})
}

// withoutRetryAfter takes that header off every answer: the library sets it while it starts, stops or times out.
func withoutRetryAfter(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		handler.ServeHTTP(responsewriter.WrapForHTTP1Or2(&headerless{ResponseWriter: w}), req)
	})
}

type headerless struct {
	http.ResponseWriter
	wrote bool
}

func (h *headerless) Unwrap() http.ResponseWriter { return h.ResponseWriter }

func (h *headerless) WriteHeader(code int) {
	h.wrote = true
	h.Header().Del("Retry-After")
	h.ResponseWriter.WriteHeader(code)
}

func (h *headerless) Write(b []byte) (int, error) {
	if !h.wrote {
		h.WriteHeader(http.StatusOK)
	}
	return h.ResponseWriter.Write(b)
}

// Address is where the server listens.
func (s *Server) Address() string {
	return s.generic.SecureServingInfo.Listener.Addr().String()
}
