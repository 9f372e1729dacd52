package agent

import (
	"context"
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"time"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// Authenticator shows other processes of the job who this one is, and checks who they are. Safe for concurrent use.
type Authenticator interface {
	// Prove returns what shows that the claim is true, which is to be about this process.
	Prove(c Claim) (proof string, err error)
	// Verify says whether the proof is one of the claim.
	Verify(ctx context.Context, c Claim, proof string) error
	// Bearer says that whoever has seen a proof could use it: it goes to nobody but a peer whose key is known.
	Bearer() bool
}

// Claim is what one end of a connection says of itself.
type Claim struct {
	Job     string // UID of the StatefulSet
	ID      ring.ID
	Listens bool   // it is the end that was dialed
	Channel []byte // secret of the two ends of this very connection, which binds a proof to it
}

// Secret is an [Authenticator] of those who hold a secret, for a cluster where the agent has no right in the API server. It does not tell
// the holders from each other.
type Secret struct{ key []byte }

// minSecret is what a secret takes so that nobody guesses it from the proofs.
const minSecret = 16

// NewSecret takes the secret, at least 16 bytes.
func NewSecret(key []byte) (*Secret, error) {
	if len(key) < minSecret {
		return nil, fmt.Errorf("secret of %d bytes: want at least %d; make one with: openssl rand -hex 32", len(key), minSecret)
	}
	return &Secret{key}, nil
}

// Prove returns a MAC of the claim.
func (s *Secret) Prove(c Claim) (string, error) {
	mac := hmac.New(sha256.New, s.key)
	fmt.Fprintf(mac, "capstan ring 1\n%q\n%d\n%q\n%d\n%t\n%x\n", c.Job, c.ID.Ordinal, c.ID.Pod, c.ID.Boot, c.Listens, c.Channel)
	return hex.EncodeToString(mac.Sum(nil)), nil
}

// Verify checks it.
func (s *Secret) Verify(_ context.Context, c Claim, proof string) error {
	want, _ := s.Prove(c)
	if !hmac.Equal([]byte(want), []byte(proof)) {
		return errors.New("it does not hold the job's secret")
	}
	return nil
}

// Bearer says no: a proof is of no use on another connection.
func (s *Secret) Bearer() bool { return false }

// Identity is the key that a process has for its life, and that its connections are encrypted with.
type Identity struct {
	certificate tls.Certificate
	key         string
}

// NewIdentity makes a key.
func NewIdentity() (*Identity, error) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	// Nobody looks at anything in it but the key: who that is, a proof says.
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0), NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, private)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &Identity{tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private}, keyOf(certificate)}, nil
}

// Key is [Peer.Key].
func (i *Identity) Key() string { return i.key }

func keyOf(c *x509.Certificate) string {
	sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

// config is for either end. check sees the other's key before a byte goes to it.
func (i *Identity) config(check func(key string) error) *tls.Config {
	return &tls.Config{
		Certificates:           []tls.Certificate{i.certificate},
		MinVersion:             tls.VersionTLS13,
		ClientAuth:             tls.RequireAnyClientCert,
		InsecureSkipVerify:     true, // no authority signs these keys: VerifyConnection, and the proof behind it, say whose they are
		SessionTicketsDisabled: true,
		VerifyConnection:       func(s tls.ConnectionState) error { return check(keyOf(s.PeerCertificates[0])) },
	}
}
