package agent

import (
	"sync"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// Peer is where a process of the job is.
type Peer struct {
	ID      ring.ID
	Address string // of the agent, host:port
	Data    string `json:",omitempty"` // of the trainer, as the trainer says; "" = it has none
	Key     string `json:",omitempty"` // SHA-256 of the public key that it has for its life, in hex; "" = not known
}

// Book is where everybody is: each process tells it to those it connects to, and the coordinator passes it on, so that DNS is needed to
// find one process only, or none. Safe for concurrent use. The zero value is empty.
type Book struct {
	mu    sync.Mutex
	peers map[ring.ID]Peer
}

// Learn writes peers down, over what was known of the same processes. Who says nothing of itself leaves the book as it is.
func (b *Book) Learn(peers ...Peer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.peers == nil {
		b.peers = map[ring.ID]Peer{}
	}
	for _, p := range peers {
		if p.Address == "" {
			continue
		}
		// Of a place that had another process, no more will be asked.
		for id := range b.peers {
			if id.Ordinal == p.ID.Ordinal && id.Pod == p.ID.Pod && id.Boot < p.ID.Boot && id.Pod != "" {
				delete(b.peers, id)
			}
		}
		b.peers[p.ID] = p
	}
	if len(b.peers) > 2*ring.MaxMembers { // pods that came and went; whoever is forgotten tells again
		clear(b.peers)
	}
}

// Peer says where a process is. Its Address is "" if that is not known.
func (b *Book) Peer(id ring.ID) Peer {
	b.mu.Lock()
	defer b.mu.Unlock()
	if p, ok := b.peers[id]; ok {
		return p
	}
	return Peer{ID: id}
}
