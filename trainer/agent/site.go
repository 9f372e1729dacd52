package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// DefaultTokenFile is where a projected serviceAccountToken is expected.
const DefaultTokenFile = "/var/run/secrets/capstan.dev/ring/token"

// Hint is an error about how something was set up, which knows the fix.
type Hint struct {
	Err error
	Fix string
}

func (h Hint) Error() string { return h.Err.Error() }
func (h Hint) Unwrap() error { return h.Err }

// SiteConfig is what a program knows of where it runs.
type SiteConfig struct {
	API       kubernetes.Interface // nil = none: the first ordinal coordinates, and nothing is recorded
	Namespace string
	Pod       string // its name, such as training-3
	PodIP     string // "" = as the API server says, or an address of this machine

	PodUID       string // without an API: the pod's UID; "" = its name
	FirstOrdinal int    // without an API: the StatefulSet's .spec.ordinals.start
	Service      string // without an API: the headless Service; "" = the StatefulSet's name
	Coordinator  string // without an API: host:port of the first ordinal's agent; "" = by the Service

	SecretFile string        // of a secret that the workers share; "" = tokens
	TokenFile  string        // "" = DefaultTokenFile
	Grace      time.Duration // 0 = as the pod says; without an API 30 s
	Listener   net.Listener  // for the other agents
	Logger     *slog.Logger
}

// Site is a worker's place in its job, and what it takes to be there.
type Site struct {
	Job          string // the StatefulSet's UID, or its name where there is no API server
	FirstOrdinal int
	Fixed        bool
	Revision     string // of the pod's template; "" = not known
	Grace        time.Duration
	Self         Peer // a program that has an address for its data adds it here
	Cluster      Cluster

	auth     Authenticator
	identity *Identity
	cfg      SiteConfig
}

// FindSite finds out whose worker this is. It asks until the API server answers, which may be away just now, or until ctx is done.
func FindSite(ctx context.Context, cfg SiteConfig) (*Site, error) {
	identity, err := NewIdentity()
	if err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(cfg.Listener.Addr().String())
	if err != nil {
		return nil, err
	}
	s := &Site{identity: identity, cfg: cfg, Grace: cfg.Grace, FirstOrdinal: cfg.FirstOrdinal, Fixed: cfg.API == nil}
	// Later starts in the same pod are known by their time.
	s.Self = Peer{ID: ring.ID{Boot: time.Now().UnixNano()}, Key: identity.Key()}
	if cfg.SecretFile != "" {
		if s.auth, err = readSecret(cfg.SecretFile); err != nil {
			return nil, err
		}
	}
	if s.Fixed {
		err = s.fixed(port)
	} else {
		err = s.kubernetes(ctx, port)
	}
	return s, err
}

func readSecret(file string) (Authenticator, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, Hint{fmt.Errorf("read the secret: %w", err), "let it be a file that all workers have, such as a mounted Secret"}
	}
	secret, err := NewSecret([]byte(strings.TrimSpace(string(data))))
	if err != nil {
		return nil, Hint{fmt.Errorf("%s: %w", file, err), "put a longer secret there"}
	}
	return secret, nil
}

func (s *Site) fixed(port string) error {
	cfg := s.cfg
	i := strings.LastIndexByte(cfg.Pod, '-')
	ordinal := ordinalOf(cfg.Pod)
	switch {
	case i < 1 || ordinal < 0:
		return Hint{fmt.Errorf("pod %q: want a name like training-3, whose number is its place in the ring", cfg.Pod), "run it in a StatefulSet, or give the pod's name"}
	case s.auth == nil:
		return Hint{errors.New("no API server and no secret: nothing would keep strangers out"), "openssl rand -hex 32 makes a secret; mount it into all workers"}
	case cfg.Coordinator == "" && cfg.Namespace == "":
		return Hint{errors.New("no API server and no namespace: the first ordinal's name is not known"), "give the namespace, or the coordinator's address"}
	}
	set := cfg.Pod[:i]
	s.Job = cfg.Namespace + "/" + set
	s.Self.ID.Ordinal, s.Self.ID.Pod = ordinal, cmp.Or(cfg.PodUID, cfg.Pod)
	s.Self.Address = net.JoinHostPort(cmp.Or(cfg.PodIP, hostIP()), port)
	s.Grace = cmp.Or(s.Grace, 30*time.Second)
	coordinator := cfg.Coordinator
	if coordinator == "" {
		coordinator = net.JoinHostPort(fmt.Sprintf("%s-%d.%s.%s.svc", set, cfg.FirstOrdinal, cmp.Or(cfg.Service, set), cfg.Namespace), port)
	}
	s.Cluster = NewFixed(s.Self.ID, cfg.FirstOrdinal, coordinator, cfg.Logger)
	return nil
}

func (s *Site) kubernetes(ctx context.Context, port string) error {
	cfg := s.cfg
	p, err := discover(ctx, cfg)
	if err != nil {
		return err
	}
	s.Job, s.FirstOrdinal, s.Revision = p.UID, p.FirstOrdinal, p.Revision
	s.Self.ID.Ordinal, s.Self.ID.Pod = p.Ordinal, p.PodUID
	s.Self.Address = net.JoinHostPort(cmp.Or(cfg.PodIP, p.IP, hostIP()), port)
	if s.Grace != 0 && s.Grace != p.Grace {
		cfg.Logger.Warn("the grace that was given is not what the pod has", "grace", s.Grace, "terminationGracePeriodSeconds", int(p.Grace.Seconds()))
	}
	s.Grace = cmp.Or(s.Grace, p.Grace)
	client := NewClient(cfg.API, cfg.Namespace, p.StatefulSet, p.UID)
	if s.auth == nil {
		file, audience := cmp.Or(cfg.TokenFile, DefaultTokenFile), Audience(cfg.Namespace, p.StatefulSet)
		if _, err := os.Stat(file); err != nil {
			return Hint{fmt.Errorf("find our token: %w", err), "mount a projected serviceAccountToken with the audience " + audience + " there, or use a secret"}
		}
		s.auth = NewToken(TokenConfig{File: file, Audience: audience, Namespace: cfg.Namespace, StatefulSet: p.StatefulSet, Keys: client.Keys})
	}
	s.Cluster = NewKubernetes(KubernetesConfig{
		Self: s.Self, StatefulSet: p.StatefulSet, FirstOrdinal: p.FirstOrdinal, Leases: client, Records: client, Workload: client, Logger: cfg.Logger,
	})
	return nil
}

func discover(ctx context.Context, cfg SiteConfig) (Place, error) {
	for {
		call, cancel := context.WithTimeout(ctx, 10*time.Second)
		p, err := Discover(call, cfg.API, cfg.Namespace, cfg.Pod)
		cancel()
		switch {
		case err == nil:
			return p, nil
		case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
			return p, Hint{err, "bind the agent's Role to the pod's ServiceAccount"}
		case apierrors.IsNotFound(err), errors.Is(err, ErrNoStatefulSet):
			return p, Hint{err, "run it in a StatefulSet's pod"}
		}
		cfg.Logger.Warn("cannot find out whose worker this is; trying again", "error", err)
		if !sleep(ctx, 2*time.Second) {
			return p, fmt.Errorf("told to go before it was known whose worker this is: %w", err)
		}
	}
}

// hostIP is an address of this machine that others may reach.
func hostIP() string {
	addresses, _ := net.InterfaceAddrs()
	for _, a := range addresses {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.IsGlobalUnicast() {
			return ip.IP.String()
		}
	}
	return "127.0.0.1"
}

// Config is the configuration of this site's agent, with cfg's own wishes about the ring.
func (s *Site) Config(cfg ring.Config, trainer Trainer) Config {
	cfg.Job, cfg.FirstOrdinal, cfg.FixedCoordinator, cfg.Version = s.Job, s.FirstOrdinal, s.Fixed, cmp.Or(cfg.Version, s.Revision)
	book := &Book{}
	return Config{
		Ring: cfg, Self: s.Self, Trainer: trainer, Cluster: s.Cluster, Book: book, Grace: s.Grace, Logger: s.cfg.Logger,
		Transport: NewTCP(TCPConfig{Job: s.Job, Self: s.Self, Identity: s.identity, Auth: s.auth, Book: book, Listener: s.cfg.Listener, Logger: s.cfg.Logger}),
	}
}
