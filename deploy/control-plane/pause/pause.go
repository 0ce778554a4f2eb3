// The process that holds the namespaces of a pod: it waits to be told to end, and reaps what is left to it.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for each := range signals {
		if each != syscall.SIGCHLD {
			return
		}
		for {
			// One signal may stand for several children.
			if ended, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); err != nil || ended <= 0 {
				break
			}
		}
	}
}
