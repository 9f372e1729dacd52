package agent

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

func TestSecret(t *testing.T) {
	if _, err := NewSecret([]byte("short")); err == nil || !strings.Contains(err.Error(), "openssl rand") {
		t.Errorf("a secret of 5 bytes: %v, want an error that says how to make one", err)
	}
	ours, _ := NewSecret([]byte("0123456789abcdef"))
	theirs, _ := NewSecret([]byte("0123456789abcdeF"))
	claim := Claim{Job: "job-1", ID: ring.ID{Ordinal: 1, Pod: "u1", Boot: 7}, Channel: []byte{1, 2, 3}}
	proof, _ := ours.Prove(claim)
	if err := ours.Verify(t.Context(), claim, proof); err != nil {
		t.Errorf("our own proof: %v", err)
	}
	other := claim
	f := func(what string, s *Secret, c Claim) {
		t.Helper()
		if s.Verify(t.Context(), c, proof) == nil {
			t.Errorf("%s is let in", what)
		}
	}
	f("another secret", theirs, claim)
	other.Job = "job-2"
	f("a proof for another job", ours, other)
	other = claim
	other.ID.Ordinal = 0
	f("a proof for another ordinal", ours, other)
	other = claim
	other.ID.Boot = 8
	f("a proof for another start", ours, other)
	other = claim
	other.Listens = true
	f("a proof sent back", ours, other)
	other = claim
	other.Channel = []byte{1, 2, 4}
	f("a proof from another connection", ours, other)
}

// tokens is a cluster that signs tokens.
type tokens struct {
	rsa   *rsa.PrivateKey
	ec    *ecdsa.PrivateKey
	reads atomic.Int32
	down  bool
}

func newTokens(t *testing.T) *tokens {
	t.Helper()
	r, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	e, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return &tokens{rsa: r, ec: e}
}

func (k *tokens) keys(context.Context) ([]byte, error) {
	k.reads.Add(1)
	if k.down {
		return nil, errors.New("the API server is away")
	}
	b := base64.RawURLEncoding.EncodeToString
	point, err := k.ec.PublicKey.Bytes()
	if err != nil {
		return nil, err
	}
	return json.Marshal(map[string]any{"keys": []map[string]string{
		{"kid": "rsa", "kty": "RSA", "alg": "RS256", "use": "sig", "n": b(k.rsa.N.Bytes()), "e": b(big.NewInt(int64(k.rsa.E)).Bytes())},
		{"kid": "ec", "kty": "EC", "alg": "ES256", "use": "sig", "crv": "P-256", "x": b(point[1:33]), "y": b(point[33:])},
		{"kid": "other", "kty": "OKP", "crv": "Ed25519", "x": b(make([]byte, 32))},
	}})
}

// sign makes a token as the API server does, for pod training-ORDINAL.
func (k *tokens) sign(t *testing.T, kid string, change func(jwt.MapClaims)) string {
	t.Helper()
	claims := jwt.MapClaims{
		"iss": "https://kubernetes.default.svc", "aud": []string{"capstan.dev/ml/training"}, "sub": "system:serviceaccount:ml:training",
		"iat": time.Now().Unix(), "nbf": time.Now().Unix(), "exp": time.Now().Add(time.Hour).Unix(),
		"kubernetes.io": map[string]any{"namespace": "ml", "pod": map[string]string{"name": "training-3", "uid": "u3"}},
	}
	if change != nil {
		change(claims)
	}
	var method jwt.SigningMethod = jwt.SigningMethodRS256
	var key any = k.rsa
	if kid == "ec" {
		method, key = jwt.SigningMethodES256, k.ec
	}
	token := jwt.NewWithClaims(method, claims)
	token.Header["kid"] = kid
	s, err := token.SignedString(key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (k *tokens) authenticator(t *testing.T) *Token {
	t.Helper()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(k.sign(t, "rsa", nil)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return NewToken(TokenConfig{File: file, Audience: Audience("ml", "training"), Namespace: "ml", StatefulSet: "training", Keys: k.keys})
}

func TestToken(t *testing.T) {
	cluster, stranger := newTokens(t), newTokens(t)
	a := cluster.authenticator(t)
	claim := Claim{Job: "job-1", ID: ring.ID{Ordinal: 3, Pod: "u3", Boot: 1}}
	pod := func(namespace, name, uid string) func(jwt.MapClaims) {
		return func(c jwt.MapClaims) {
			c["kubernetes.io"] = map[string]any{"namespace": namespace, "pod": map[string]string{"name": name, "uid": uid}}
		}
	}
	set := func(key string, value any) func(jwt.MapClaims) { return func(c jwt.MapClaims) { c[key] = value } }
	none := jwt.NewWithClaims(jwt.SigningMethodNone, jwt.MapClaims{"aud": "capstan.dev/ml/training"})
	unsigned, err := none.SignedString(jwt.UnsafeAllowNoneSignatureType)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, token, want string
	}{
		{"RSA", cluster.sign(t, "rsa", nil), ""},
		{"elliptic curve", cluster.sign(t, "ec", nil), ""},
		{"of another cluster", stranger.sign(t, "rsa", nil), "signature is invalid"},
		{"for the API server", cluster.sign(t, "rsa", set("aud", []string{"https://kubernetes.default.svc"})), "invalid audience"},
		{"for another job", cluster.sign(t, "rsa", set("aud", []string{"capstan.dev/ml/other"})), "invalid audience"},
		{"expired", cluster.sign(t, "rsa", set("exp", time.Now().Add(-time.Minute).Unix())), "token is expired"},
		{"for ever", cluster.sign(t, "rsa", func(c jwt.MapClaims) { delete(c, "exp") }), "exp claim is required"},
		{"of another issuer", cluster.sign(t, "rsa", set("iss", "https://example.com")), "invalid issuer"},
		{"of a stray pod", cluster.sign(t, "rsa", pod("ml", "notebook", "u9")), "token of pod ml/notebook"},
		{"of another ordinal", cluster.sign(t, "rsa", pod("ml", "training-0", "u0")), "want ml/training-3"},
		{"of the pod that had the name before", cluster.sign(t, "rsa", pod("ml", "training-3", "u2")), `want ml/training-3, "u3"`},
		{"of another namespace", cluster.sign(t, "rsa", pod("mine", "training-3", "u3")), "token of pod mine/training-3"},
		{"of no pod", cluster.sign(t, "rsa", func(c jwt.MapClaims) { delete(c, "kubernetes.io") }), "token of pod /"},
		{"unsigned", unsigned, "signing method none is invalid"},
		{"nothing", "", "token is malformed"},
	} {
		err := a.Verify(t.Context(), claim, c.token)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("a token %s: %v, want %q", c.name, err, c.want)
		}
	}
	if cluster.reads.Load() != 1 {
		t.Errorf("the keys were read %d times, want once", cluster.reads.Load())
	}
}

// A token of an unknown key has the keys read again, but not by every stranger; and an API server that is away is asked again.
func TestTokenKeysAreReadAgain(t *testing.T) {
	cluster := newTokens(t)
	a := cluster.authenticator(t)
	synctest.Test(t, func(t *testing.T) {
		claim := Claim{ID: ring.ID{Ordinal: 3, Pod: "u3", Boot: 1}}
		year := func(c jwt.MapClaims) { // the bubble's clock is in the past
			c["iat"], c["nbf"], c["exp"] = time.Now().Unix(), time.Now().Unix(), time.Now().Add(time.Hour).Unix()
		}
		cluster.down = true
		if err := a.Verify(t.Context(), claim, cluster.sign(t, "rsa", year)); err == nil || !strings.Contains(err.Error(), "away") {
			t.Errorf("without the API server: %v, want that it is away", err)
		}
		cluster.down = false
		if err := a.Verify(t.Context(), claim, cluster.sign(t, "rsa", year)); err != nil {
			t.Errorf("with the API server back: %v", err)
		}
		for range 10 {
			if a.Verify(t.Context(), claim, cluster.sign(t, "rotated", year)) == nil {
				t.Error("a token of an unknown key is let in")
			}
		}
		if cluster.reads.Load() != 2 {
			t.Errorf("the keys were read %d times, want 2", cluster.reads.Load())
		}
		time.Sleep(askAgain)
		a.Verify(t.Context(), claim, cluster.sign(t, "rotated", year))
		if cluster.reads.Load() != 3 {
			t.Errorf("after %s the keys were read %d times, want 3", askAgain, cluster.reads.Load())
		}
	})
}

func FuzzKeys(f *testing.F) {
	f.Add([]byte(`{"keys":[{"kid":"a","kty":"EC","crv":"P-256","x":"AA","y":"AA"}]}`))
	f.Add([]byte(`{"keys":[{"kid":"a","kty":"RSA","n":"AQAB","e":"AQAB"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		keys, err := parseKeys(data)
		if err == nil && len(keys) == 0 {
			t.Error("neither keys nor an error")
		}
		for id, k := range keys {
			if r, ok := k.(*rsa.PublicKey); ok && (r.N.BitLen() < 2040 || r.E < 3) {
				t.Errorf("key %q is weak: %d bits, e %d", id, r.N.BitLen(), r.E)
			}
		}
	})
}
