package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

// serveDoor accepts on file descriptor 3 and forwards every connection to the target, until it is told to end.
func serveDoor(ctx context.Context, target string) error {
	listener, err := net.FileListener(os.NewFile(3, "door"))
	if err != nil {
		return fmt.Errorf("file descriptor 3 is no listener: %w", err)
	}
	context.AfterFunc(ctx, func() { listener.Close() })
	for {
		outside, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		go forward(outside.(*net.TCPConn), target)
	}
}

// forward copies both ways, and passes on when one side has no more to say.
func forward(outside *net.TCPConn, target string) {
	defer outside.Close()
	connection, err := net.DialTimeout("tcp", target, 5*time.Second)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	inside := connection.(*net.TCPConn)
	defer inside.Close()
	done := make(chan struct{}, 2)
	half := func(to, from *net.TCPConn) {
		_, _ = io.Copy(to, from) // an error ends this direction, as its end does
		_ = to.CloseWrite()
		done <- struct{}{}
	}
	go half(inside, outside)
	go half(outside, inside)
	<-done
	<-done
}
