// Package tls gives the adapter its own CA and certificate, the API server the means to verify it, and the exporters what they need to
// let in nobody but the adapter.
//
// CA and certificate are kept in one Secret that all replicas share; the first that starts makes it. What others need is handed to them
// in Secrets of their own, without the CA's key. Both are renewed in
// time, with the old and the new CA trusted side by side for as long as somebody may know only one of them. The
// APIService's caBundle is filled in, and insecureSkipTLSVerify is never relied on.
//
// An APIService that names another Service belongs to somebody else and is never touched: the owner is said in the log,
// in an event and by [Manager.Foreign].
//
// [Material] is the pure core; [Manager] carries it out.
package tls

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	aggregator "k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset"
)

// FieldManager owns the caBundle.
const FieldManager = "capstan-adapter"

// Config of a Manager.
type Config struct {
	Client      kubernetes.Interface // required
	Aggregator  aggregator.Interface // required
	Namespace   string               // of the Secret and the Service; required
	Secret      string               // required
	Service     string               // required
	APIServices []string             // at least one, such as v1beta1.external.metrics.k8s.io
	Pod         string               // whom events are about; "" = no events

	Handed []Handed // certificates for others

	CAValidity   time.Duration // 0 = 5 years
	CertValidity time.Duration // 0 = 90 days
	Interval     time.Duration // between two looks at Secret and APIService; 0 = 10 s, or less for short-lived certificates

	Logger *slog.Logger // nil = slog.Default()
}

// Handed is a Secret in which another program finds a certificate, its key and the CAs that it is to trust.
type Handed struct {
	Namespace, Secret string
	Purpose
}

// Manager keeps the certificate. It is a [dynamiccertificates.CertKeyContentProvider]. Safe for concurrent use.
type Manager struct {
	cfg     Config
	policy  Policy
	serving Purpose
	log     *slog.Logger
	ready   chan struct{} // closed when there is a certificate

	current atomic.Pointer[credentials] // nil before there is a certificate

	mu        sync.Mutex       // protects all following fields
	foreign   map[string]error // by APIService
	said      string           // newest trouble that was logged
	listeners []dynamiccertificates.Listener
}

// credentials are what the adapter shows and whom it trusts. Immutable.
type credentials struct {
	cert, key, bundle []byte // PEM
	expiry            time.Time
}

var _ dynamiccertificates.CertKeyContentProvider = (*Manager)(nil)

// New makes a Manager and starts nothing.
func New(cfg Config) *Manager {
	cfg.CAValidity = cmp.Or(cfg.CAValidity, 5*365*24*time.Hour)
	cfg.CertValidity = cmp.Or(cfg.CertValidity, 90*24*time.Hour)
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	m := &Manager{
		cfg:    cfg,
		policy: Policy{CAValidity: cfg.CAValidity, CertValidity: cfg.CertValidity, Overlap: min(time.Hour, cfg.CertValidity/10)},
		// To the exporters, the adapter is a client.
		serving: Purpose{Names(cfg.Service, cfg.Namespace), []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}},
		log:     cfg.Logger.With("component", "tls"),
		ready:   make(chan struct{}),
		foreign: map[string]error{},
	}
	m.cfg.Interval = cmp.Or(m.cfg.Interval, min(10*time.Second, m.policy.Overlap/4))
	return m
}

// Names are those that a Service's serving certificate is for; the aggregator asks for the first.
func Names(service, namespace string) []string {
	base := service + "." + namespace
	return []string{base + ".svc", base, base + ".svc.cluster.local", service}
}

// Ready is closed when there is a certificate to serve.
func (m *Manager) Ready() <-chan struct{} { return m.ready }

// Expiry is when the served certificate ends; zero = there is none.
func (m *Manager) Expiry() time.Time {
	if c := m.current.Load(); c != nil {
		return c.expiry
	}
	return time.Time{}
}

// Foreign is not nil while every APIService belongs to another Service, so that nobody asks this one; its text says whose they are.
func (m *Manager) Foreign() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []error
	for _, name := range m.cfg.APIServices {
		if m.foreign[name] == nil {
			return nil
		}
		all = append(all, m.foreign[name])
	}
	return errors.Join(all...)
}

// ForeignOne is not nil while this APIService belongs to another Service.
func (m *Manager) ForeignOne(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.foreign[name]
}

// Name is for the library's log.
func (m *Manager) Name() string { return "secret " + m.cfg.Namespace + "/" + m.cfg.Secret }

// CurrentCertKeyContent is the served certificate and its key, in PEM.
func (m *Manager) CurrentCertKeyContent() (cert, key []byte) {
	if c := m.current.Load(); c != nil {
		return c.cert, c.key
	}
	return nil, nil
}

// AddListener adds one that is told of every new certificate.
func (m *Manager) AddListener(l dynamiccertificates.Listener) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.listeners = append(m.listeners, l)
}

// Run keeps Secret and APIService right until ctx is done. What goes wrong is logged when it begins and tried again.
func (m *Manager) Run(ctx context.Context) {
	ticker := time.NewTicker(m.cfg.Interval)
	defer ticker.Stop()
	for {
		err := m.Sync(ctx, time.Now())
		if ctx.Err() != nil {
			return
		}
		m.say(err)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// say logs what changed.
func (m *Manager) say(err error) {
	m.mu.Lock()
	before := m.said
	m.said = ""
	if err != nil {
		m.said = err.Error()
	}
	now := m.said
	m.mu.Unlock()
	switch {
	case now == before:
	case now == "":
		m.log.Info("certificate and APIService are as they should be")
	default:
		m.log.Warn("certificate or APIService is not as it should be; trying again", "err", err)
	}
}

// Sync looks once, and does what is to be done.
func (m *Manager) Sync(ctx context.Context, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	given, givenErr := m.given(ctx)
	material, err := m.syncSecret(ctx, given, givenErr == nil, now)
	if err != nil {
		return err
	}
	if err := m.serve(material); err != nil {
		return err
	}
	errs := []error{givenErr, m.hand(ctx, material, given, now)}
	for _, name := range m.cfg.APIServices {
		errs = append(errs, m.syncAPIService(ctx, name, material.Bundle()))
	}
	return errors.Join(errs...)
}

// given reads the Secrets that were handed out, in the order of the configuration; nil = it is not there.
func (m *Manager) given(ctx context.Context) ([]*corev1.Secret, error) {
	list := make([]*corev1.Secret, len(m.cfg.Handed))
	var errs []error
	for i, h := range m.cfg.Handed {
		secret, err := m.cfg.Client.CoreV1().Secrets(h.Namespace).Get(ctx, h.Secret, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			errs = append(errs, fmt.Errorf("read Secret %s/%s: %w", h.Namespace, h.Secret, err))
		default:
			list[i] = secret
		}
	}
	return list, errors.Join(errs...)
}

// hand writes what others need. Where another replica is faster, the next look finds what it made.
func (m *Manager) hand(ctx context.Context, material Material, given []*corev1.Secret, now time.Time) error {
	var errs []error
	for i, h := range m.cfg.Handed {
		secret, absent := given[i], given[i] == nil
		if absent {
			secret = &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: h.Namespace, Name: h.Secret}, Type: corev1.SecretTypeTLS}
		}
		data, why, err := material.Hand(secret.Data, h.Purpose, m.policy, now)
		if err == nil && why != "" {
			secret.Data = data
			write := m.cfg.Client.CoreV1().Secrets(h.Namespace)
			if absent {
				_, err = write.Create(ctx, secret, metav1.CreateOptions{FieldManager: FieldManager})
			} else {
				_, err = write.Update(ctx, secret, metav1.UpdateOptions{FieldManager: FieldManager})
			}
			switch {
			case err == nil:
				m.log.Info("a certificate for others", "secret", h.Namespace+"/"+h.Secret, "why", why)
			case faster(err):
				err = nil
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("write Secret %s/%s: %w", h.Namespace, h.Secret, err))
		}
	}
	return errors.Join(errs...)
}

// faster says that another replica did it.
func faster(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
}

// syncSecret reads the Secret and renews what is due. Of several replicas that do it at once, one wins and the others take what it made.
// No CA is dropped unless it is known what others were given.
func (m *Manager) syncSecret(ctx context.Context, given []*corev1.Secret, known bool, now time.Time) (Material, error) {
	policy := m.policy
	policy.KeepOlder = !known
	secrets := m.cfg.Client.CoreV1().Secrets(m.cfg.Namespace)
	for range 5 {
		secret, err := secrets.Get(ctx, m.cfg.Secret, metav1.GetOptions{})
		absent := apierrors.IsNotFound(err)
		if err != nil && !absent {
			return Material{}, fmt.Errorf("read Secret %s: %w", m.cfg.Secret, err)
		}
		if absent {
			secret = &corev1.Secret{
				ObjectMeta: metav1.ObjectMeta{Namespace: m.cfg.Namespace, Name: m.cfg.Secret},
				Type:       corev1.SecretTypeTLS,
			}
		}
		material, err := Parse(secret.Data)
		if err != nil {
			m.log.Warn("the Secret cannot be read; what is spoiled is made anew", "secret", m.cfg.Secret, "err", err)
		}
		for _, secret := range given {
			if secret == nil {
				continue
			}
			if cert, _ := handed(secret.Data); cert != nil { // one that cannot be read is made anew
				material.Handed = append(material.Handed, cert)
			}
		}
		changed := false
		for {
			action, why := material.Next(m.serving, policy, now)
			if action == Keep {
				break
			}
			if material, err = material.Do(action, m.serving, policy, now); err != nil {
				return Material{}, err
			}
			m.log.Info(action.String(), "why", why)
			changed = true
		}
		if !changed {
			return material, nil
		}
		if secret.Data, err = material.Data(); err != nil {
			return Material{}, err
		}
		if absent {
			_, err = secrets.Create(ctx, secret, metav1.CreateOptions{FieldManager: FieldManager})
		} else {
			_, err = secrets.Update(ctx, secret, metav1.UpdateOptions{FieldManager: FieldManager})
		}
		switch {
		case faster(err):
			continue
		case err != nil:
			return Material{}, fmt.Errorf("write Secret %s: %w", m.cfg.Secret, err)
		}
		return material, nil
	}
	return Material{}, fmt.Errorf("write Secret %s: others change it all the time", m.cfg.Secret)
}

// serve takes the certificate into service.
func (m *Manager) serve(material Material) error {
	key, err := keyPEM(material.Serving.Key)
	if err != nil {
		return err
	}
	next := &credentials{certPEM(material.Serving.Cert), key, material.Bundle(), material.Serving.Cert.NotAfter}
	was := m.current.Load()
	if was != nil && bytes.Equal(was.cert, next.cert) && bytes.Equal(was.bundle, next.bundle) {
		return nil
	}
	m.current.Store(next)
	m.mu.Lock()
	listeners := m.listeners
	m.mu.Unlock()
	for _, l := range listeners {
		l.Enqueue()
	}
	if was == nil {
		close(m.ready)
	}
	return nil
}

// ForeignError says that the APIService is another Service's.
type ForeignError struct{ APIService, Owner string }

func (e *ForeignError) Error() string {
	return fmt.Sprintf("APIService %s belongs to %s: only one product can serve it in a cluster, so this adapter is never asked; remove the other one, or its APIService", e.APIService, e.Owner)
}

// Patch is the merge patch that makes the APIService trust the bundle, nil if it does already. It carries the resource
// version, so that it fails when the owner changes in between.
func Patch(current *apiregistrationv1.APIService, namespace, service string, bundle []byte) ([]byte, error) {
	switch s := current.Spec.Service; {
	case s == nil:
		return nil, &ForeignError{current.Name, "the API server itself"}
	case s.Namespace != namespace || s.Name != service:
		return nil, &ForeignError{current.Name, "Service " + s.Namespace + "/" + s.Name}
	case bytes.Equal(current.Spec.CABundle, bundle) && !current.Spec.InsecureSkipTLSVerify:
		return nil, nil
	}
	return json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": current.ResourceVersion},
		"spec":     map[string]any{"caBundle": bundle, "insecureSkipTLSVerify": false},
	})
}

func (m *Manager) syncAPIService(ctx context.Context, name string, bundle []byte) error {
	services := m.cfg.Aggregator.ApiregistrationV1().APIServices()
	current, err := services.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read APIService %s: %w", name, err)
	}
	patch, err := Patch(current, m.cfg.Namespace, m.cfg.Service, bundle)
	if m.setForeign(name, err) && err != nil {
		m.event(ctx, "ForeignAPIService", err.Error())
	}
	if err != nil || patch == nil {
		return err
	}
	if _, err := services.Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: FieldManager}); err != nil {
		return fmt.Errorf("fill in caBundle of APIService %s: %w", name, err)
	}
	m.log.Info("caBundle filled in", "apiservice", name)
	return nil
}

// setForeign remembers whose the APIService is, and says whether that changed.
func (m *Manager) setForeign(name string, err error) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	was := m.foreign[name]
	m.foreign[name] = err
	return (was == nil) != (err == nil) || err != nil && was.Error() != err.Error()
}

// event tells those who look at the pod. An event that cannot be written is only logged.
func (m *Manager) event(ctx context.Context, reason, text string) {
	if m.cfg.Pod == "" {
		return
	}
	now := metav1.Now()
	_, err := m.cfg.Client.CoreV1().Events(m.cfg.Namespace).Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{GenerateName: m.cfg.Pod + ".", Namespace: m.cfg.Namespace},
		InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: m.cfg.Namespace, Name: m.cfg.Pod},
		Type:           corev1.EventTypeWarning, Reason: reason, Message: text,
		Source:         corev1.EventSource{Component: FieldManager},
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
		ReportingController: "capstan.dev/adapter",
	}, metav1.CreateOptions{})
	if err != nil {
		m.log.Warn("event not written", "reason", reason, "err", err)
	}
}
